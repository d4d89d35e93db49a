"""What an engine hands over when its session is made."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Protocol

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.session.padding import GraphOf, no_graphs
from sam_rollout.sources import Scored


class Requests(Protocol):
    """What an engine knows of its requests, whether in the batch or not."""

    @property
    def live(self) -> Collection[str]:
        """Ids of all requests that have not ended; preempted ones are among them."""
        ...

    def identity(self, request_id: str) -> RequestIdentity | None:
        """Who a live request is; asked once, when it joins, if a source needs it."""
        ...

    def takes_no_drafts(self, request_id: str) -> bool:
        """Whether a live request is sampled without drafts; asked once, when it joins."""
        ...


@dataclasses.dataclass(frozen=True)
class EngineHooks:
    """What a session asks its engine from step to step.

    Attributes:
        graph_of: tells the graph of a step, for `sam.pad_drafts`; asked from the first step on.
        sampler_us: host time in the samplers since the last call, for the record.
        heard: what the model said at scored positions since the last call, or None; told whether
            the gate is open.
        made: drafts made elsewhere for this step, as `Source.receive` takes them, or None.
        made_after: steps from `DraftSession.wants_made` to the first one that has such drafts.
        takes_trees: whether a live request's drafts may be trees, asked once, when it joins; None
            where the engine verifies chains alone.
    """

    graph_of: GraphOf = no_graphs
    sampler_us: Callable[[], float] = lambda: 0.0
    heard: Callable[[bool], Scored | None] = lambda _open: None
    made: Callable[[], tuple[Int32Array, np.ndarray | None] | None] = lambda: None
    made_after: int = 1
    takes_trees: Callable[[str], bool] | None = None


NO_HOOKS = EngineHooks()  # of an engine that is asked nothing
