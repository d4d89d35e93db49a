"""What a simulated rollout decides by: how many drafts a step verifies, and who runs where."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sam_rollout.gating import Gate
from sam_rollout.simulation.chances import Acceptance
from sam_rollout.simulation.costs import StepCosts

IntArray = npt.NDArray[np.int64]


# (running requests, their mean context) -> drafts a request, 0 to shut the gate.
DraftBudget = Callable[[int, float], int]


def gate_budget(gate: Gate) -> DraftBudget:
    """What a gate of the library allows that looks at the number of running requests alone."""
    return lambda running, context: gate.budget(running)


def measured_budget(
    costs: StepCosts, chances: Sequence[Acceptance], most: Sequence[int] | None = None
) -> DraftBudget:
    """The gate `auto` when it has measured all there is: the budget with the most tokens a second.

    Neither what learning costs is in it, nor that acceptance is learned by the number of requests
    and not, as here, by their context.

    Args:
        costs: of steps with up to as many drafts as may be made.
        chances: of k drafts, for k = 1, 2, ...
        most: running requests with which k drafts may be made at most, for k = 1, 2, ...; without
            it as many as there are.
    """

    def budget(running: int, context: float) -> int:
        ks = (k for k in range(1, len(chances) + 1) if most is None or running <= most[k - 1])
        # Where two are alike, the shorter draft.
        rates = {0: 1.0 / costs.at(running, 0, context)} | {
            k: chances[k - 1].expected(k, context) / costs.at(running, k, context) for k in ks
        }
        return max(rates, key=rates.__getitem__) if running else 0

    return budget


def no_drafts(running: int, context: float) -> int:
    """The baseline: as `DraftBudget`."""
    return 0


def tabulate(budget: DraftBudget, most: int, contexts: Sequence[float]) -> IntArray:
    """The budget for 0..most running requests at each context, int64[most + 1, contexts]."""
    table = [[budget(running, context) for context in contexts] for running in range(most + 1)]
    return np.array(table, np.int64)
