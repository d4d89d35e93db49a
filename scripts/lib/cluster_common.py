"""What the launcher and the nodes' parts share: options, what is said, signals, exit statuses."""

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
RESOURCES = {"ascend_910c": "NPU", "cuda": "GPU", "cpu": "GPU"}  # what verl asks Ray for
PORT, DASHBOARD_PORT = 6766, 8260  # verl's multi-node practice
JOINED = "joined the cluster"  # the launcher looks for these words
TAIL_LINES = 20
POLL_S = 1.0
SIGNAL_POLL_S = 0.1  # how late a signal may be noticed


class ClusterError(Exception):
    """Something a user can put right; the text says what."""


class Stopped(SystemExit):
    """A signal asks for the end of everything; with the exit status that a shell would give."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.reason = f"stopped by {signal.Signals(number).name}"


signals: list[int] = []  # that came


def listen() -> None:
    """Take signals as the wish to end, which ``pause`` raises: nothing else is interrupted."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: signals.append(number))


def pause(seconds: float) -> None:
    """Sleep, but not past a signal, which raises ``Stopped``."""
    deadline = time.monotonic() + seconds
    while not signals and (left_s := deadline - time.monotonic()) > 0:
        time.sleep(min(left_s, SIGNAL_POLL_S))
    if signals:
        raise Stopped(signals[0])


def show(line: str, to: int = 1) -> None:
    """Print a line, without a buffer that would break the end of a run whose reader is gone."""
    with contextlib.suppress(OSError):  # read no more (``| head``): the run goes on
        os.write(to, f"{line}\n".encode())


def say(message: str) -> None:
    """Announce a step; the launcher passes such lines of every node on."""
    show(f"==> {message}")


def tell_error(message: str) -> None:
    """Print an error."""
    show(f"error: {message}", to=2)


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def shell_status(status: int | None) -> int | None:
    """Exit status of a process as a shell gives it: 128 + n after signal n."""
    return 128 - status if status is not None and status < 0 else status


def split_words(name: str, text: str) -> list[str]:
    """Split a command line that was given as ``name``; ClusterError if a quote is not closed."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ClusterError(f"{name}: {text}: {str(error).lower()}") from None


def make_parser(program: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of the options that the launcher takes and hands to the nodes' parts."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    add = parser.add_argument
    add("--config", nargs="+", default=[], metavar="OVERRIDE", help="of the recipe (head)")
    add("--device", choices=tuple(RESOURCES), help="default: what each node has")
    add("--devices-per-node", type=int, help="dies, GPUs or logical devices; default: all")
    add("--interface", help="network interface of training (default: of the default route)")
    add("--port", type=int, default=PORT, help="of Ray on the head")
    add("--dashboard-port", type=int, default=DASHBOARD_PORT, help="on the head; 0: no dashboard")
    add("--timeout", type=int, default=600, help="s, for all nodes to join")
    # The job's own error says more than ours, if it comes.
    add("--loss-grace", type=int, default=30, help="s, for a job that lost a node to end")
    add("--ray-options", default="", help="more options for ray start")
    add("--doctor", action="store_true", help="look at all nodes instead of running the recipe")
    add("--print", action="store_true", help="print what would be started, start nothing")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Refuse, with a ClusterError, ports that Ray gives to its client server and its workers."""
    split_words("--ray-options", options.ray_options)
    for name in ("port", "dashboard_port"):
        if 10001 <= (port := getattr(options, name)) <= 19999:
            raise ClusterError(
                f"--{name.replace('_', '-')} {port}: must not be in 10001..19999, which Ray gives "
                "to its workers"
            )


def run_program(run: Callable[[], int]) -> None:
    """End the program with the exit status of ``run``, or with the error that a user can mend."""
    try:
        raise SystemExit(run())
    except ClusterError as error:
        tell_error(str(error))
        raise SystemExit(EXIT_NO_CLUSTER) from None
