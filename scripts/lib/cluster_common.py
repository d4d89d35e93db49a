"""Contains the options, output, signals and exit statuses that launcher and nodes share."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
EXIT_NO_CLUSTER, EXIT_NODE_LOST, EXIT_REFUSED = 3, 4, 5
RESOURCES = {"ascend_910c": "NPU", "cuda": "GPU", "cpu": "GPU"}  # what verl requests from Ray
PORT, DASHBOARD_PORT = 6766, 8260  # the ports of verl's multi-node examples
JOINED = "joined the cluster"  # the launcher searches for these words
TAIL_LINES = 20
POLL_S = 1.0
SIGNAL_POLL_S = 0.1  # longest time until a signal is noticed


class ClusterError(Exception):
    """An error that the user can mend; the message says how."""


class Stopped(SystemExit):
    """A signal ends the program, with the exit status that a shell would report."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.reason = f"stopped by {signal.Signals(number).name}"


signals: list[int] = []  # received signals


def listen() -> None:
    """Record signals; only ``pause`` reacts to signals, so nothing else is interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))


def pause(seconds: float) -> None:
    """Sleep; raise ``Stopped`` as soon as a signal has arrived."""
    deadline = time.monotonic() + seconds
    while not signals and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(left_s, SIGNAL_POLL_S))
    if signals:
        raise Stopped(signals[0])


def show(line: str, to: int = 1) -> None:
    """Print a line without a buffer: if the reader has ended, a buffer could not be flushed."""
    with contextlib.suppress(OSError):  # the reader has closed the pipe (``| head``)
        os.write(to, f"{line}\n".encode())


def say(message: str) -> None:
    """Print what this program does; the launcher shows such lines of every node."""
    show(f"==> {message}")


def tell_error(message: str) -> None:
    show(f"error: {message}", to=2)


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def shell_status(status: int | None) -> int | None:
    """Return a process's exit status as a shell reports it: 128 + n after signal n."""
    return 128 - status if status is not None and status < 0 else status


def split_words(name: str, text: str) -> list[str]:
    """Split the value of the option or variable ``name`` into words, as a shell would."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ClusterError(f"{name}: {text}: {str(error).lower()}") from None


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser for the options that the launcher and scripts/node.sh share."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    add = parser.add_argument
    add("--config", nargs="+", default=[], metavar="OVERRIDE", help="of the recipe, on the head")
    add("--device", choices=tuple(RESOURCES), help="default: what each node has")
    add("--devices-per-node", type=int, help="dies, GPUs or logical devices; default: all")
    add("--interface", help="network interface of training; default: that of the default route")
    add("--port", type=int, default=PORT, help="of Ray on the head")
    add("--dashboard-port", type=int, default=DASHBOARD_PORT, help="on the head; 0: no dashboard")
    add("--timeout", type=int, default=600, help="seconds for all nodes to join")
    # The job gets time to end by itself, because its own error is more informative than ours.
    add("--loss-grace", type=int, default=30, help="seconds until a job that lost a node is ended")
    add("--ray-options", default="", help="more options for ray start")
    add("--doctor", action="store_true", help="look at all nodes instead of running the recipe")
    add("--print", action="store_true", help="print what would be started, start nothing")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse ports that Ray uses for its client server and its workers."""
    split_words("--ray-options", options.ray_options)
    for name in ("port", "dashboard_port"):
        if 10001 <= (port := getattr(options, name)) <= 19999:
            raise ClusterError(
                f"--{name.replace('_', '-')} {port}: must not be in 10001..19999, which Ray gives "
                "to its workers"
            )


def run_program(run: Callable[[], int]) -> None:
    """Call ``run``, and end the program with its exit status or with a `ClusterError`'s message."""
    try:
        raise SystemExit(run())
    except ClusterError as error:
        tell_error(str(error))
        raise SystemExit(EXIT_NO_CLUSTER) from None
