"""Checks of the network interfaces through which the nodes of a run connect."""

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
    """Check that the interfaces named by the variables exist and are up."""
    up = sorted(name for name, state in psutil.net_if_stats().items() if state.isup)
    for name in INTERFACE_VARIABLES[question.device]:
        given = question.environment.get(name, "")
        # Names are prefixes. A leading "=" asks for exact names, a leading "^" excludes names.
        prefixes = tuple(filter(None, given.lstrip("=").split(",")))
        fix = f"name the interface all nodes share ({', '.join(up)}); scripts/node.sh does that"
        if not given and question.many_nodes:
            yield warn(name, "not set: the library chooses one", fix)
        elif not given:
            yield skip(name, "not set, and not needed on one node")
        else:
            right = given[0] == "^" or any(interface.startswith(prefixes) for interface in up)
            yield judge(name, given if right else f"{given} is not up here", fix, fails=not right)
