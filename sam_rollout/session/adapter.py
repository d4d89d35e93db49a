"""Defines the interface through which a session uses its engine."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.session.padding import NO_GRAPH, GraphOf
from sam_rollout.sources.contract import Scored


class Requests(Protocol):
    """The requests that an engine knows, also those outside the current batch."""

    @property
    def live(self) -> Collection[str]:
        """Ids of all requests that have not ended, preempted ones included."""

    def identity(self, request_id: str) -> RequestIdentity | None:
        """Return the identity of a live request that joins a batch, if a source needs it."""

    def takes(self, request_id: str, shape: str) -> bool:
        """Return whether a live request may have drafts of a shape (chain or tree)."""


@dataclasses.dataclass(frozen=True)
class EngineHooks:
    """Functions and properties of an engine that its `DraftSession` uses in every step.

    Attributes:
        graph_of: returns the kind of graph that a step would run in; `sam.pad_drafts` needs it.
        heard: returns the positions that the model scored since the last call, or None. The
            argument says whether the gate is open.
        made: returns a draft model's drafts for this step, or None. The drafts have the form of the
            arguments of `Source.receive`.
        made_after: number of steps after which `made` first returns drafts, counted from the step
            in which `DraftSession.wants_made` becomes true.
        verifies_trees: whether the engine can verify draft trees; if not, it gets chains only.
    """

    graph_of: GraphOf = lambda _tokens, _uniform: NO_GRAPH
    heard: Callable[[bool], Scored | None] = lambda _open: None
    made: Callable[[], tuple[Int32Array, np.ndarray | None] | None] = lambda: None
    made_after: int = 1
    verifies_trees: bool = False


NO_HOOKS = EngineHooks()  # for an engine that offers no hooks
