"""The interfaces through which the nodes of a run find each other."""

from collections.abc import Iterator

import psutil

from sam_rollout.doctor.printed_checks import Line, judge, skip, warn
from sam_rollout.doctor.scope import Question

INTERFACE_VARIABLES = {
    "ascend_910c": ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
    "cuda": ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"),
    "cpu": ("GLOO_SOCKET_IFNAME",),
}


def check_interfaces(question: Question) -> Iterator[Line]:
    """Look whether the interfaces that are named, by prefix as a rule, are there and up."""
    up = sorted(name for name, state in psutil.net_if_stats().items() if state.isup)
    for name in INTERFACE_VARIABLES[question.device]:
        given = question.environment.get(name, "")
        # "=" in front makes prefixes whole names, "^" makes them those to leave out.
        prefixes = tuple(filter(None, given.lstrip("=").split(",")))
        fix = f"name the interface that all nodes share, of {', '.join(up)}; scripts/node.sh does"
        if not given and question.many_nodes:
            yield warn(name, "not set: the library guesses", fix)
        elif not given:
            yield skip(name, "not set, and not needed on one node")
        else:
            right = given[0] == "^" or any(interface.startswith(prefixes) for interface in up)
            yield judge(name, given if right else f"{given} is not up here", fix, fails=not right)
