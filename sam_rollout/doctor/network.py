"""Ports, and the interfaces through which the nodes of a run find each other."""

import socket
from collections.abc import Iterator

import psutil

from sam_rollout.doctor.question import Question
from sam_rollout.doctor.report import Line, fail, judge, ok, skip, warn

# Of the head node, as in verl's instructions for several Ascend nodes.
RAY_PORTS = {6766: "Ray", 8260: "Ray's dashboard"}
INTERFACE_VARIABLES = {
    "ascend_910c": ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    "cuda": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "cpu": ("GLOO_SOCKET_IFNAME",),
}


def check_ray_ports(question: Question) -> Iterator[Line]:
    """Look whether the ports of a Ray head are free; in a running cluster the head holds them."""
    for port, whose in RAY_PORTS.items() if not question.cluster else ():
        fix = "end that program, ray stop, or start the head with another port"
        taken = not is_free(port)
        found = f"taken, wanted for {whose}" if taken else f"free for {whose}"
        yield judge(f"port {port}", found, fix, warns=taken)


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


def check_interfaces(question: Question) -> Iterator[Line]:
    """Look whether the interfaces that are named, by prefix as a rule, have an address."""
    addresses = interface_addresses()
    known = ", ".join(f"{name} {address}" for name, address in addresses.items())
    for name in INTERFACE_VARIABLES[question.device]:
        given = question.environment.get(name, "")
        # "=" in front makes prefixes whole names, "^" makes them those to leave out.
        prefixes = tuple(filter(None, given.lstrip("=").split(",")))
        if given and (given[0] == "^" or any(key.startswith(prefixes) for key in addresses)):
            yield ok(name, given)
        elif given:
            yield fail(name, f"{given} has no address here", f"those that have one: {known}")
        elif question.many_nodes:
            fix = f"name the interface that all nodes share ({known}); scripts/node.sh does"
            yield warn(name, "not set: the library guesses", fix)
        else:
            yield skip(name, "not set, and not needed on one node")


def interface_addresses() -> dict[str, str]:
    """Interface that is up -> its first IPv4 address, or routable IPv6 address."""
    states, found = psutil.net_if_stats(), {}
    for name, entries in psutil.net_if_addrs().items():
        inet = [e.address for e in entries if e.family == socket.AF_INET]
        inet6 = [e.address for e in entries if e.family == socket.AF_INET6]
        inet += [address for address in inet6 if not address.startswith("fe80")]
        if inet and name in states and states[name].isup:
            found[name] = inet[0]
    return found
