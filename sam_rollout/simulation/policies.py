"""What a simulated rollout decides by: how many drafts a step verifies, and who runs where."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sam_rollout.config import SamConfig
from sam_rollout.gating import Gate, make_gate

IntArray = npt.NDArray[np.int64]


class DraftBudget(Protocol):
    """How many drafts each request may verify in a step."""

    def __call__(self, running: int, context: float) -> int:
        """Drafts a request, 0 to shut the gate, by running requests and their mean context."""
        ...


class GateBudget:
    """A gate of the library, which opens or shuts, and a fixed number of drafts.

    Args:
        gate: asked with the number of running requests, as in the engine.
        k: drafts a request while it is open.
    """

    def __init__(self, gate: Gate, k: int) -> None:
        self._gate, self._k = gate, k

    def __call__(self, running: int, context: float) -> int:
        """As `DraftBudget`."""
        return self._k if self._gate.open(running) else 0


def no_drafts(running: int, context: float) -> int:
    """The baseline: as `DraftBudget`."""
    return 0


def budget_of(sam: SamConfig) -> DraftBudget:
    """What a configuration drafts."""
    if not sam.enabled:
        return no_drafts
    return GateBudget(make_gate(sam.gate), sam.max_draft_tokens)


def tabulate(budget: DraftBudget, most: int, contexts: Sequence[float]) -> IntArray:
    """The budget for 0..most running requests at each context, int64[most + 1, contexts]."""
    table = [[budget(running, context) for context in contexts] for running in range(most + 1)]
    return np.array(table, np.int64)


class Router(Protocol):
    """Chooses an engine for every request, in order of arrival; `sam_rollout.routing` has some."""

    def assign(self, group: Hashable, siblings: int = 1) -> Hashable:
        """Choose the engine of a request that starts now."""
        ...


def place(
    groups: Iterable[Hashable], engines: int, make_router: Callable[[Iterable[Hashable]], Router]
) -> IntArray:
    """Engine of each request of a round; all arrive before the first one ends.

    Args:
        groups: of each request, in order of arrival.
        engines: number of engines.
        make_router: from the engines' names, `LeastLoaded` or `GroupRouter`.
    """
    groups = list(groups)
    sizes: dict[Hashable, int] = {}
    for group in groups:
        sizes[group] = sizes.get(group, 0) + 1
    router = make_router(range(engines))
    return np.array([router.assign(group, sizes[group]) for group in groups], np.int64)
