"""Makes the machines of a cluster from namespaces of this machine. Needs Linux and root.

Each machine has its own network interface and address, host name, process table, /tmp and /dev/shm.
The other file systems are shared. All processes of a machine end with its first process, which ends
with this program.
"""

from __future__ import annotations

import shlex
import subprocess
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
SUBNET = "10.213.77"
SHM_SIZE = "2g"
COMMAND_TIMEOUT_S = 60
FIRST_PROCESS = "echo up; while read -r _; do :; done"
SSH = """#!/usr/bin/env bash
# Takes ssh's place: ssh HOST COMMAND
case "$1" in
{pids}
    *) echo "ssh: connect to host $1 port 22: No route to host" >&2; exit 255 ;;
esac
exec nsenter --target "$pid" --all --wdns=/ bash -c "$2"
"""


def _run(*command: str) -> None:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
    )
    if done.returncode:
        raise OSError(f"{shlex.join(command)}: {done.stderr.strip() or done.returncode}")


class Holder:
    def __init__(self, *namespaces: str) -> None:
        unshare = ["unshare", *namespaces, "--fork", "--kill-child"]
        self._process = subprocess.Popen(
            [*unshare, "bash", "-c", FIRST_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # so that a ctrl-C for this program does not end the machine
        )
        if self._process.stdout.readline() != b"up\n":
            raise OSError(f"{shlex.join(unshare)}: {self._process.stderr.read().decode().strip()}")
        own = self._process.pid
        self.pid = int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[0])

    def enter(self, *command: str, namespaces: str = "--all") -> list[str]:
        return ["nsenter", "--target", str(self.pid), namespaces, "--wdns=/", *command]

    def end(self) -> None:
        self._process.kill()
        self._process.wait(timeout=COMMAND_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            pipe.close()


class Machine(Holder):
    def __init__(self, name: str, address: str) -> None:
        self.name, self.address = name, address
        super().__init__("--net", "--uts", "--mount", "--pid", "--ipc", "--mount-proc")


class Lan:
    """Machines on one switch; a ``with`` statement starts and ends them.

    Args:
        names: Host names, one for each machine.
        folder: Contains files of the cluster, among them a folder for each machine's /tmp.
    """

    def __init__(self, names: list[str], folder: Path) -> None:
        self._names, self._folder = names, folder
        self.addresses = {name: f"{SUBNET}.{n}" for n, name in enumerate(names, 1)}
        self.machines: dict[str, Machine] = {}
        self._switch: Holder | None = None

    def __enter__(self) -> Lan:
        try:
            self._switch = Holder("--net")
            self._on_switch("ip", "link", "add", "br0", "type", "bridge")
            self._on_switch("ip", "link", "set", "br0", "up")
            for name in self._names:
                self.start(name)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for holder in [*self.machines.values(), self._switch]:
            if holder is not None:
                holder.end()

    def power_off(self, name: str) -> None:
        """End a machine as a power cut does: no connection is closed."""
        self._on_switch("ip", "link", "del", self._port(name))
        self.machines.pop(name).end()

    def ssh(self) -> Path:
        """Write a program that replaces ssh; return its path."""
        pids = "\n".join(f"    {name}) pid={m.pid} ;;" for name, m in self.machines.items())
        program = self._folder / "ssh"
        program.write_text(SSH.format(pids=pids))
        program.chmod(0o755)
        return program

    def _on_switch(self, *command: str) -> None:
        _run(*self._switch.enter(*command, namespaces="--net"))

    def start(self, name: str) -> None:
        machine = Machine(name, self.addresses[name])
        self.machines[name] = machine  # from here on, `__exit__` ends the machine
        port = self._port(name)
        peer = ["peer", "name", "eth0", "netns", str(machine.pid)]
        self._on_switch("ip", "link", "add", port, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", port, "master", "br0", "up")
        _run(*machine.enter("bash", "-euc", self._set_up(machine)))

    @staticmethod
    def _port(name: str) -> str:
        return f"port-{name}"[:15]  # the kernel takes at most 15 characters

    def _set_up(self, machine: Machine) -> str:
        own_tmp = self._folder / "tmp" / machine.name
        own_tmp.mkdir(parents=True, exist_ok=True)
        hosts = self._folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{a} {n}" for n, a in self.addresses.items())]
        hosts.write_text("\n".join(lines) + "\n")
        mounts = [f"mount --bind {hosts} /etc/hosts"]
        for shared in (self._folder, REPOSITORY):
            if shared.is_relative_to("/tmp"):
                inside = own_tmp / shared.relative_to("/tmp")
                mounts += [f"mkdir -p {inside}", f"mount --bind {shared} {inside}"]
        return "\n".join(
            [
                f"hostname {machine.name}",
                "ip link set lo up",
                f"ip address add {machine.address}/24 dev eth0",
                "ip link set eth0 up",
                f"ip route add default via {SUBNET}.254",
                f"mount -t tmpfs -o size={SHM_SIZE} tmpfs /dev/shm",
                *mounts,
                f"mount --rbind {own_tmp} /tmp",
            ]
        )


def why_not() -> str | None:
    try:
        with tempfile.TemporaryDirectory() as folder, Lan(["probe"], Path(folder)):
            return None
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
