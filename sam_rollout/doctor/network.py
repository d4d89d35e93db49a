"""Ports, and the interfaces through which the nodes of a run find each other."""

import re
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
from packaging.version import Version

from sam_rollout.doctor.line import Line, fail, judge, ok, skip, warn
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.versions import installed

# Of the head node, as in verl's instructions for several Ascend nodes.
RAY_PORTS = {6766: "Ray", 8260: "Ray's dashboard"}
RAYS_OWN = re.compile(r"/ray/(core|dashboard|_private)/|\bgcs_server\b|\braylet\b|\bray::")
RAY_WITH_TOKEN = "2.52"  # the first to read RAY_AUTH_MODE; scripts/lib/cluster.py says the same
INTERFACE_VARIABLES = {
    "ascend_910c": ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    "cuda": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "cpu": ("GLOO_SOCKET_IFNAME",),
}
HCCL_RANGE = "HCCL_HOST_SOCKET_PORT_RANGE"
KERNEL = Path("/proc/sys/net/ipv4")


def check_ray_ports(question: Question) -> Iterator[Line]:
    """Look whether the ports of a Ray head are free, or already Ray's."""
    for port, whose in RAY_PORTS.items():
        if is_free(port):
            yield ok(f"port {port}", f"free for {whose}")
            continue
        owner = owner_of(port)
        if RAYS_OWN.search(owner):
            yield ok(f"port {port}", f"{whose} runs")
            continue
        found = f"taken by {owner[:80] or 'a process of another user'}, wanted for {whose}"
        fix = "end that process, or start the head with another port"
        yield judge(f"port {port}", found, fix, fails=question.many_nodes, warns=True)


def check_ray_token(question: Question) -> Iterator[Line]:
    """Look whether this Ray can ask for a token: whoever reaches one that cannot runs programs."""
    version = installed("ray")
    if version is None:
        yield skip("Ray's token", "ray is not installed")
    elif Version(version) < Version(RAY_WITH_TOKEN):
        found = f"ray {version} knows none: who reaches its ports can run programs here"
        fix = f"keep its ports from others (a firewall), or install ray >= {RAY_WITH_TOKEN}"
        yield judge("Ray's token", found, fix, warns=question.many_nodes)
    else:
        yield ok("Ray's token", f"ray {version} asks for one if RAY_AUTH_TOKEN is set")


def is_free(port: int) -> bool:
    """Whether a server could listen there."""
    with socket.socket() as server:
        # Connections of a server that has ended do not count.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
        except OSError:
            return False
    return True


def owner_of(port: int) -> str:
    """Command of the process that holds a local port; empty if one may not know."""
    try:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid:
                process = psutil.Process(connection.pid)
                return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        pass
    return ""


def check_hccl_ports(question: Question) -> Iterator[Line]:
    """Look at the ports that HCCL is told to use on the host."""
    given = question.environment.get(HCCL_RANGE, "auto")
    if given == "auto":
        yield ok(HCCL_RANGE, "auto: verl lets the system choose")
        return
    bounds = re.fullmatch(r"(\d+)-(\d+)", given)
    if bounds is None:
        yield fail(HCCL_RANGE, repr(given), "first-last, such as 60000-60050, or auto")
        return
    ports = range(int(bounds[1]), int(bounds[2]) + 1)
    taken = [port for port in ports if not is_free(port)]
    wanted = int(question.setting("trainer.n_gpus_per_node", 1))
    if len(ports) - len(taken) < wanted:
        found = f"{given}: {len(taken)} of {len(ports)} are taken, {wanted} processes need one each"
        yield fail(HCCL_RANGE, found, "end what holds them, or give a longer range")
    elif set(ports) <= kept_from_connections():
        yield ok(HCCL_RANGE, f"{given}, {len(taken)} taken")
    else:
        fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={given}"
        yield warn(HCCL_RANGE, f"{given}: the system gives them to connections, too", fix)


def kept_from_connections() -> set[int]:
    """Ports that the kernel does not give to outgoing connections."""
    first, last = map(int, (KERNEL / "ip_local_port_range").read_text().split())
    kept = set(range(1, 65536)) - set(range(first, last + 1))
    for part in filter(None, (KERNEL / "ip_local_reserved_ports").read_text().strip().split(",")):
        low, _, high = part.partition("-")
        kept |= set(range(int(low), int(high or low) + 1))
    return kept


def check_interfaces(question: Question) -> Iterator[Line]:
    """Look whether the interfaces that are named exist and have an address."""
    addresses = interface_addresses()
    for name in INTERFACE_VARIABLES[question.device]:
        given = question.environment.get(name, "")
        if not given:
            if question.many_nodes:
                known = ", ".join(sorted(set(addresses) - {"lo"}))
                fix = (
                    f"name the interface that all nodes share; here are {known}. scripts/node.sh "
                    "does, scripts/node.sh doctor asks as it would start a run"
                )
                yield warn(name, "not set: the library guesses", fix)
            else:
                yield skip(name, "not set, and not needed on one node")
            continue
        chosen = matching(given, addresses)
        used = {interface: addresses[interface] for interface in chosen if addresses[interface]}
        if used:
            yield ok(name, ", ".join(f"{key} {value}" for key, value in used.items()))
        else:
            why = "has no address" if chosen else "does not exist"
            known = ", ".join(key for key, value in addresses.items() if value)
            yield fail(name, f"{given} {why} here", f"with an address are: {known}")


def interface_addresses() -> dict[str, str]:
    """Interface -> its first IPv4 or routable IPv6 address; "" without one or when it is down."""
    states = psutil.net_if_stats()
    found = {}
    for name, entries in psutil.net_if_addrs().items():
        inet = [e.address for e in entries if e.family == socket.AF_INET]
        inet6 = [e.address for e in entries if e.family == socket.AF_INET6]
        inet += [address for address in inet6 if not address.startswith("fe80")]
        up = name in states and states[name].isup
        found[name] = inet[0] if inet and up else ""
    return found


def matching(given: str, addresses: Mapping[str, str]) -> list[str]:
    """Interfaces that a value of such a variable selects, by the rules of NCCL and HCCL.

    A list of prefixes; "=" in front makes them whole names, "^" those to leave out.
    """
    exact, without = "=" in given[:2], given.startswith("^")
    names = [name for name in given.lstrip("^=").split(",") if name]

    def selected(interface: str) -> bool:
        return interface in names if exact else interface.startswith(tuple(names))

    return [name for name in addresses if selected(name) != without]
