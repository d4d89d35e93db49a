"""Defines the interface through which a session uses its engine."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.session.padding import GraphOf, no_graphs
from sam_rollout.sources.contract import Scored


class Requests(Protocol):
    """The engine's requests, in the batch or not."""

    @property
    def live(self) -> Collection[str]:
        """Ids of all requests that have not ended, preempted ones included."""

    def identity(self, request_id: str) -> RequestIdentity | None:
        """Return a live request's identity; called when the request joins, if a source needs it."""

    def takes(self, request_id: str, shape: str) -> bool:
        """Whether a live request may have drafts of a shape; called once, when it joins."""


@dataclasses.dataclass(frozen=True)
class EngineHooks:
    """Functions of the engine that its session calls from step to step.

    Attributes:
        graph_of: returns the graph of a step, for `sam.pad_drafts`; called from the first step on.
        sampler_us: returns the host time in the samplers since its last call, in microseconds.
        heard: returns the positions scored since its last call, or None; the argument says whether
            the gate is open.
        made: returns the arguments of `Source.receive` for this step, or None.
        made_after: number of steps from the one in which `DraftSession.wants_made` becomes true to
            the first one for which `made` returns drafts.
        verifies_trees: whether drafts may be trees; if not, they are chains.
    """

    graph_of: GraphOf = no_graphs
    sampler_us: Callable[[], float] = lambda: 0.0
    heard: Callable[[bool], Scored | None] = lambda _open: None
    made: Callable[[], tuple[Int32Array, np.ndarray | None] | None] = lambda: None
    made_after: int = 1
    verifies_trees: bool = False


NO_HOOKS = EngineHooks()  # for an engine that offers no hooks
