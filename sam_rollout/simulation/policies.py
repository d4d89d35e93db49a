"""What a simulated rollout decides by: how many drafts a step verifies, and who runs where."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sam_rollout.config import SamConfig
from sam_rollout.gating import Gate, fixed_gate

IntArray = npt.NDArray[np.int64]


class DraftBudget(Protocol):
    """How many drafts each request may verify in a step."""

    def __call__(self, running: int, context: float) -> int:
        """Drafts a request, 0 to shut the gate, by running requests and their mean context."""
        ...


class GateBudget:
    """A gate of the library that looks at the number of running requests alone.

    Args:
        gate: asked as in the engine.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __call__(self, running: int, context: float) -> int:
        """As `DraftBudget`."""
        return self._gate.budget(running)


def no_drafts(running: int, context: float) -> int:
    """The baseline: as `DraftBudget`."""
    return 0


def budget_of(sam: SamConfig) -> DraftBudget:
    """What a configuration drafts.

    Raises:
        ValueError: its gate learns from the engine's own steps, of which there are none here.
    """
    if sam.gate.kind == "auto":
        raise ValueError(
            "sam.gate.kind = 'auto' learns from the steps of an engine and cannot be simulated: "
            "simulate 'threshold' or 'schedule'"
        )
    if not sam.enabled:
        return no_drafts
    return GateBudget(fixed_gate(sam.gate, sam.max_draft_tokens))


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
