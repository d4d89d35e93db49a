"""Who this node is in a cluster: its rank, how many nodes there are, where the head is.

What is given explicitly wins. Of the variables, those that count nodes come before RANK and
WORLD_SIZE, which in some environments count processes. docs/multinode.md has the list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

RANK_VARIABLES = ("NODE_RANK", "SLURM_NODEID", "JOB_COMPLETION_INDEX", "RANK")
NODES_VARIABLES = ("NNODES", "SLURM_JOB_NUM_NODES", "WORLD_SIZE")
HEAD_VARIABLES = ("MASTER_ADDR",)
SLURM_NODES = "SLURM_JOB_NODELIST"
KUBERNETES = "KUBERNETES_SERVICE_HOST"


class ClusterError(Exception):
    """Something a user can put right; the text says what."""


@dataclass(frozen=True)
class Given:
    """What the command line says; None where it says nothing."""

    rank: int | None = None
    nodes: int | None = None
    head: str | None = None
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Identity:
    """One node's place; ``names`` are the nodes' names by rank, ``head`` is rank 0's address."""

    rank: int
    nodes: int
    head: str
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """This node's name."""
        return self.names[self.rank]


@dataclass(frozen=True)
class Host:
    """What the machine knows about itself; functions, because the answers take time."""

    environment: Mapping[str, str]
    name: str
    full_name: Callable[[], str]
    slurm_names: Callable[[str], list[str]]  # of a Slurm node list


def identify(given: Given, host: Host) -> Identity:
    """Put a node's place together from options, variables and names.

    Raises:
        ClusterError: Says what is missing or contradictory, and how it can be given.
    """
    stem, ordinal = _ordinal_of(host)
    rank = given.rank
    if rank is None:
        rank = _number(host.environment, RANK_VARIABLES)
    if rank is None:
        rank = ordinal
    if rank is None:
        raise _missing("this node's rank", "--node-rank", RANK_VARIABLES)
    names = given.names or _slurm_names(host)
    nodes = given.nodes
    if nodes is None:
        nodes = _number(host.environment, NODES_VARIABLES) or (len(names) if names else None)
    if nodes is None:
        raise _missing("the number of nodes", "--num-nodes", NODES_VARIABLES)
    if not 0 <= rank < nodes:
        raise ClusterError(
            f"this node's rank is {rank}, but there are {nodes} nodes: 0..{nodes - 1}"
        )
    if names is None:
        names = _names(nodes, rank, host.name, stem if ordinal == rank else None)
    if len(names) != nodes:
        raise ClusterError(f"{nodes} nodes, but {len(names)} names: {', '.join(names)}")
    head = given.head or _text(host.environment, HEAD_VARIABLES)
    if head is None:
        head = _head_by_name(host, rank, names, stem if ordinal == rank else None)
    return Identity(rank, nodes, head, tuple(names))


def _text(environment: Mapping[str, str], variables: tuple[str, ...]) -> str | None:
    return next((environment[name] for name in variables if environment.get(name)), None)


def _number(environment: Mapping[str, str], variables: tuple[str, ...]) -> int | None:
    for name in variables:
        if text := environment.get(name):
            if not text.isdecimal():
                raise ClusterError(f"{name}={text}: must be a number")
            return int(text)
    return None


def _missing(what: str, option: str, variables: tuple[str, ...]) -> ClusterError:
    return ClusterError(f"{what} is not known: give {option}, or set {' or '.join(variables)}")


def _ordinal_of(host: Host) -> tuple[str | None, int | None]:
    """Stem and number of a StatefulSet's pod, ``name-3``."""
    match = re.fullmatch(r"(.+)-(\d+)", host.name)
    if match is None or KUBERNETES not in host.environment:
        return None, None
    return match[1], int(match[2])


def _slurm_names(host: Host) -> tuple[str, ...] | None:
    nodes = host.environment.get(SLURM_NODES)
    return tuple(host.slurm_names(nodes)) if nodes else None


def _names(nodes: int, rank: int, own: str, stem: str | None) -> tuple[str, ...]:
    if stem:
        return tuple(f"{stem}-{number}" for number in range(nodes))
    return tuple(own if number == rank else f"rank {number}" for number in range(nodes))


def _head_by_name(host: Host, rank: int, names: tuple[str, ...], stem: str | None) -> str:
    if host.environment.get(SLURM_NODES):
        return names[0]
    if rank == 0:
        return host.name
    if stem:
        # Pods of a StatefulSet find each other through its headless service.
        own, _, domain = host.full_name().partition(".")
        if domain:
            return f"{own.rpartition('-')[0]}-0.{domain}"
    raise _missing("the head's address", "--head-address", HEAD_VARIABLES)
