"""Runs scripts/node.sh on every node over ssh; scripts/launch_multinode.sh calls it.

Each node runs scripts/lib/cluster.py, which reads Ray's token from standard input and ends when the
input closes. So if this program is killed, no process remains on the nodes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import cluster_common as common
from cluster_common import EXIT_NO_CLUSTER, POLL_S, REPOSITORY, ClusterError, say, show, tell_error

# ssh must not ask for a password, and has to notice within a minute that the other side is gone.
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
END_S = 90.0  # time limit for a node's part to end
# These variables hold the paths of model and data. Workers use only the model's path.
PASSED_ON = ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE")
SHOWN = ("==> ", "error: ")  # a worker's line is shown if it begins with one of these


class Target(NamedTuple):
    """A node: ssh's destination, the node's name, and its address (needed for the head only)."""

    destination: str
    name: str
    address: str


def read_nodes(path: Path) -> list[Target]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ClusterError(f"--nodes {path}: {error.strerror}") from None
    targets: dict[str, Target] = {}
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ClusterError(f"{path}, line {number}: must be HOST or HOST ADDRESS")
        name = words[0].rpartition("@")[2]
        if name in targets:
            raise ClusterError(f"{path}, line {number}: {name} is named twice")
        address = words[1] if len(words) == 2 else "" if targets else resolve(name)
        targets[name] = Target(words[0], name, address)
    if not targets:
        raise ClusterError(f"--nodes {path}: names no node")
    return list(targets.values())


def resolve(name: str) -> str:
    """Return the address at which the other nodes reach the head."""
    address = "no address"
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
        if not address.startswith("127."):
            return address
    raise ClusterError(
        f"the head {name} means {address} here: after the name, write the head's address on the "
        f"training network, as in '{name} 10.0.0.1'"
    )


class Remote:
    """Runs a node's part over ssh; writes its output to a file, and shows some of its lines."""

    def __init__(self, name: str, command: list[str], token: str, log: Path, head: bool) -> None:
        self.name, self.log, self.joined, self._head = name, log, False, head
        log.touch()  # tail() may be called before the first output
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ctrl-C must only reach this program, which ends all parts
        )
        with contextlib.suppress(BrokenPipeError):  # the part has ended; its output says why
            self._process.stdin.write(f"{token}\n".encode())
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.log.open("wb", buffering=0) as log:
            for raw in self._process.stdout:
                log.write(raw)
                line = raw.decode(errors="replace").rstrip("\n")
                self.joined = self.joined or common.JOINED in line
                if self._head:
                    show(line)
                elif line.startswith(SHOWN):
                    show(f"[{self.name}] {line}")

    @property
    def status(self) -> int | None:
        """The exit status as a shell reports it; None while the part runs."""
        return common.shell_status(self._process.poll())

    def tell_to_end(self) -> None:
        """Close the part's standard input, which makes the part end."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for the part's end; close the connection if the part exceeds the time limit."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            say(f"{self.name}: no end within {seconds:.0f} s, closing the connection")
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=seconds)


def ssh_command() -> list[str]:
    """Return the command that reaches a node: the variable SSH, or ssh with our options."""
    return common.split_words("SSH", os.environ.get("SSH") or SSH)


def node_command(options: argparse.Namespace, targets: list[Target], rank: int) -> list[str]:
    part = ["bash", "scripts/node.sh", "head" if rank == 0 else "worker", "--attached"]
    part += [f"--node-rank={rank}", f"--num-nodes={len(targets)}"]
    part += [f"--names={','.join(target.name for target in targets)}"]
    part += [f"--head-address={targets[0].address}"]
    for name in ("device", "devices_per_node", "interface", "port", "dashboard_port", "timeout",
                 "loss_grace", "ray_options"):  # fmt: skip
        if (value := getattr(options, name)) not in (None, ""):
            part.append(f"--{name.replace('_', '-')}={value}")
    if rank == 0:
        part += [*(["--doctor"] if options.doctor else []), "--config", *options.config]
    given = [f"{name}={os.environ[name]}" for name in PASSED_ON if name in os.environ]
    words = shlex.join(["env", *given, *options.env, *part])
    remote = f"cd {shlex.quote(str(options.remote_dir))} && exec {words}"
    return [*ssh_command(), targets[rank].destination, remote]


def launch(options: argparse.Namespace, targets: list[Target]) -> int:
    """Run all nodes' parts until the head ends or a worker fails to join; return the status."""
    options.log_dir.mkdir(parents=True, exist_ok=True)
    token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
    parts: list[Remote] = []
    try:
        for rank, target in enumerate(targets):
            log = options.log_dir / f"{rank}-{target.name}.log"
            command = node_command(options, targets, rank)
            parts.append(Remote(target.name, command, token, log, head=rank == 0))
        return wait(*parts)
    except common.Stopped as stopped:
        say(f"{stopped.reason}; ending all nodes' parts")
        raise
    finally:
        # The head's part ends first; otherwise it would report workers as lost.
        for some in (parts[:1], parts[1:]):
            for part in some:
                part.tell_to_end()
            deadline = time.monotonic() + END_S
            for part in some:
                part.wait(max(deadline - time.monotonic(), 1.0))


def wait(head: Remote, *workers: Remote) -> int:
    """Wait until the head ends, or a worker ends before it has joined; return the exit status."""
    ended: set[Remote] = set()
    while head.status is None:
        common.pause(POLL_S)
        for part in workers:
            if part.status is None or part in ended:
                continue
            ended.add(part)
            if not part.joined:
                tell_error(f"{part.name} ended with status {part.status} before it joined:")
                tell_log(part)
                return EXIT_NO_CLUSTER
            say(f"{part.name}: its part ended with status {part.status}")
    head.wait(END_S)
    if head.status:
        for part in workers:
            if not part.joined and head.status != common.EXIT_REFUSED:
                tell_error(f"{part.name} did not join; its last lines ({part.log}):")
                tell_log(part)
        show(f"exit status {head.status}; logs of all nodes: {head.log.parent}")
    return EXIT_NO_CLUSTER if head.status == 255 else head.status  # 255: ssh failed


def tell_log(part: Remote) -> None:
    for line in common.tail(part.log).splitlines() or ["(it said nothing)"]:
        show(f"    {line}", to=2)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = common.make_parser(
        "scripts/launch_multinode.sh",
        "Trains on many nodes over ssh (docs/clusters.md). Passed on to every node if they are "
        f"set here: {', '.join(PASSED_ON)}.",
    )
    add = parser.add_argument
    add("--nodes", type=Path, required=True, help="file with one node a line, the head first")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="on all nodes; repeatable")
    add("--remote-dir", type=Path, default=REPOSITORY, help="checkout's folder on every node")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    add("--log-dir", type=Path, default=REPOSITORY / "outputs" / "multinode" / stamp)
    options = parser.parse_args(arguments)
    if not options.config:
        parser.error("the following arguments are required: --config")
    for assignment in options.env:
        if "=" not in assignment:
            parser.error(f"--env {assignment}: must be NAME=VALUE")
    return options


def run(options: argparse.Namespace) -> int:
    """Launch the run, or print its commands; return the exit status."""
    common.check_options(options)
    targets = read_nodes(options.nodes)
    if options.print:
        for rank in range(len(targets)):
            print(shlex.join(node_command(options, targets, rank)))
        return 0
    program = ssh_command()[0]
    if shutil.which(program) is None:
        raise ClusterError(f"SSH: {program} is no program here: install it, or name another in SSH")
    common.listen()
    say(f"{len(targets)} nodes, head {targets[0].name}; logs: {options.log_dir}")
    return launch(options, targets)


if __name__ == "__main__":
    common.run_program(lambda: run(parse(sys.argv[1:])))
