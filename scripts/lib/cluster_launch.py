"""Runs scripts/node.sh on every node over ssh; called by scripts/launch_multinode.sh.

The nodes' parts hang on their standard input: it brings them Ray's token, and its end, however it
comes about, ends them. So nothing is left behind when this program is killed or the network fails.
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
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from cluster import (
    EXIT_NO_CLUSTER,
    EXIT_REFUSED,
    JOINED,
    POLL_S,
    REPOSITORY,
    TAIL_LINES,
    Stop,
    add_cluster_options,
    check_ports,
    say,
    shell_status,
    show,
    split_words,
    tell_error,
)
from cluster_identity import ClusterError

# Without a password prompt nobody sees, and noticing within a minute that the other side is gone.
SSH = "ssh -o BatchMode=yes -o ServerAliveInterval=15 -o ServerAliveCountMax=4"
END_S = 90.0  # for a node's part to end when it is told to
# Where model and data lie: the configuration reads them from the environment, on the head and, for
# the model, on every node.
PASSED_ON = ("MODEL_PATH", "TRAIN_FILE", "TEST_FILE")
SHOWN = ("==> ", "error: ")  # lines of workers that are shown as they come


@dataclass(frozen=True)
class Target:
    """A node as the launcher knows it: what ssh is given, its name, its address."""

    destination: str
    address: str

    @property
    def name(self) -> str:
        """The node's name: the destination without a user."""
        return self.destination.rpartition("@")[2]


def read_nodes(path: Path) -> list[Target]:
    """Read the file of nodes.

    Raises:
        ClusterError: It cannot be read, names no node, or one twice, or one without an address.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ClusterError(f"--nodes {path}: {error.strerror}") from None
    targets: list[Target] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ClusterError(f"{path}, line {number}: must be HOST or HOST ADDRESS")
        target = Target(words[0], words[-1] if len(words) == 2 else "")
        if target.name in {known.name for known in targets}:
            raise ClusterError(f"{path}, line {number}: {target.name} is named twice")
        targets.append(target)
    if not targets:
        raise ClusterError(f"--nodes {path}: names no node")
    head = targets[0]
    return [Target(head.destination, head.address or resolve(head.name)), *targets[1:]]


def resolve(name: str) -> str:
    """Address of the head at which the other nodes can reach it."""
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = ""
    if not address or address.startswith("127."):
        raise ClusterError(
            f"the head {name} {'means ' + address if address else 'has no address'} here: write "
            f"its address on the network of training behind it, '{name} 10.0.0.1'"
        )
    return address


class Remote:
    """A node's part, run over ssh; its output goes to a file, and line by line to ``show``."""

    def __init__(self, target: Target, command: list[str], token: str, log: Path, head: bool):
        self.name, self.log, self.joined = target.name, log, False
        self._head = head
        log.touch()  # for tail(), however early it is asked
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # ctrl-C is for this program, which ends its parts in order
        )
        with contextlib.suppress(BrokenPipeError):  # ended already; its output will say why
            self._process.stdin.write(f"{token}\n".encode())
            self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self.log.open("wb", buffering=0) as log:
            for raw in self._process.stdout:
                log.write(raw)
                line = raw.decode(errors="replace").rstrip("\n")
                self.joined = self.joined or JOINED in line
                if self._head:
                    show(line)
                elif line.startswith(SHOWN):
                    show(f"[{self.name}] {line}")

    @property
    def status(self) -> int | None:
        """Exit status, as a shell would give it; None while it runs."""
        return shell_status(self._process.poll())

    def tail(self) -> str:
        """Its last lines."""
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join(f"    {line}" for line in lines) or "    (it said nothing)"

    def tell_to_end(self) -> None:
        """Close its standard input."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait for its end; end the connection if it takes too long."""
        try:
            self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            say(f"{self.name}: no end within {seconds:.0f} s, closing the connection")
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=seconds)


def ssh_command() -> list[str]:
    """What reaches a node: ssh with our options, or what SSH says."""
    return split_words("SSH", os.environ.get("SSH") or SSH)


def node_command(options: argparse.Namespace, targets: list[Target], rank: int) -> list[str]:
    """The command line that starts one node's part."""
    part = ["bash", "scripts/node.sh", "head" if rank == 0 else "worker", "--attached"]
    part += [f"--node-rank={rank}", f"--num-nodes={len(targets)}"]
    part += [f"--names={','.join(target.name for target in targets)}"]
    part += [f"--head-address={targets[0].address}", f"--port={options.port}"]
    part += [f"--timeout={options.timeout}", f"--loss-grace={options.loss_grace}"]
    for name in ("device", "devices_per_node", "interface", "ray_options"):
        if (value := getattr(options, name)) is not None:
            part.append(f"--{name.replace('_', '-')}={value}")
    if rank == 0:
        part += ["--doctor"] if options.doctor else []
        part += [f"--dashboard-port={options.dashboard_port}", "--config", *options.config]
    folder = shlex.quote(str(options.remote_dir))
    # What --env says comes last, and counts.
    given = [f"{name}={os.environ[name]}" for name in PASSED_ON if name in os.environ]
    remote = f"cd {folder} && exec {shlex.join(['env', *given, *options.env, *part])}"
    return [*ssh_command(), targets[rank].destination, remote]


class Launch:
    """All nodes' parts, from start to end."""

    def __init__(self, options: argparse.Namespace, targets: list[Target], stop: Stop) -> None:
        options.log_dir.mkdir(parents=True, exist_ok=True)
        self._stop = stop
        # A token of the user's own lets other programs of theirs in, such as the doctor.
        token = os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(32)
        self._parts: list[Remote] = []
        for rank, target in enumerate(targets):
            command = node_command(options, targets, rank)
            log = options.log_dir / f"{rank}-{target.name}.log"
            self._parts.append(Remote(target, command, token, log, head=rank == 0))

    def run(self) -> int:
        """Wait for the head, or for what makes waiting pointless; returns the exit status."""
        head, *workers = self._parts
        ended: set[str] = set()
        try:
            while head.status is None and not self._stop.wait(POLL_S):
                for part in workers:
                    if part.status is None or part.name in ended:
                        continue
                    ended.add(part.name)
                    if not part.joined:
                        return self._give_up(part)
                    say(f"{part.name}: its part ended with status {part.status}")
            if self._stop.reason:
                say(f"{self._stop.reason}; ending all nodes' parts")
                return self._stop.status
            return self._judge()
        finally:
            self.end()

    def _give_up(self, part: Remote) -> int:
        tell_error(f"{part.name} ended with status {part.status} before it joined:\n{part.tail()}")
        return EXIT_NO_CLUSTER

    def _judge(self) -> int:
        head, *workers = self._parts
        head.wait(END_S)
        if head.status:
            for part in workers:
                if not part.joined and head.status != EXIT_REFUSED:
                    last = f"its last lines ({part.log}):\n{part.tail()}"
                    tell_error(f"{part.name} did not join; {last}")
            show(f"exit status {head.status}; logs of all nodes: {head.log.parent}")
        # ssh's own failure
        return EXIT_NO_CLUSTER if head.status == 255 else head.status

    def end(self) -> None:
        """End what still runs: the job with the head first, so that no worker counts as lost."""
        for parts in (self._parts[:1], self._parts[1:]):
            for part in parts:
                part.tell_to_end()
            deadline = time.monotonic() + END_S
            for part in parts:
                part.wait(max(deadline - time.monotonic(), 1.0))


def parse(arguments: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/launch_multinode.sh",
        description="Trains on many nodes over ssh (docs/multinode.md).",
        epilog=f"{', '.join(PASSED_ON)}: passed on to every node if they are set here.",
    )
    add = parser.add_argument
    add("--config", nargs="+", required=True, metavar="OVERRIDE", help="of the recipe")
    add("--nodes", type=Path, required=True, help="file with one node a line, the head first")
    add("--device", choices=("ascend_910c", "cuda", "cpu"), help="default: what each node has")
    add("--devices-per-node", type=int, help="default: as many as each node has")
    add("--interface", help="network interface of training (default: of the default route)")
    add_cluster_options(parser)
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="on every node; repeat")
    add("--ray-options", help="more options for ray start")
    add("--remote-dir", type=Path, default=REPOSITORY, help="of the checkout on every node")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    add("--log-dir", type=Path, default=REPOSITORY / "outputs" / "multinode" / stamp)
    add("--doctor", action="store_true", help="look at all nodes instead of training")
    add("--print", action="store_true", help="print the commands, run nothing")
    options = parser.parse_args(arguments)
    for assignment in options.env:
        if "=" not in assignment:
            parser.error(f"--env {assignment}: must be NAME=VALUE")
    return options


def run(options: argparse.Namespace) -> int:
    """Launch, or print what would be; returns the exit status."""
    check_ports(options)
    targets = read_nodes(options.nodes)
    if options.print:
        for rank in range(len(targets)):
            print(shlex.join(node_command(options, targets, rank)))
        return 0
    program = ssh_command()[0]
    if shutil.which(program) is None:
        raise ClusterError(f"SSH: {program} is no program here: install it, or name another in SSH")
    stop = Stop()
    stop.listen()
    say(f"{len(targets)} nodes, head {targets[0].name}; logs: {options.log_dir}")
    return Launch(options, targets, stop).run()


def main() -> None:
    """Run the command."""
    try:
        sys.exit(run(parse(sys.argv[1:])))
    except ClusterError as failure:
        tell_error(str(failure))
        sys.exit(EXIT_NO_CLUSTER)


if __name__ == "__main__":
    main()
