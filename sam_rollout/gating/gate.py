"""Gates: how many tokens each request may draft in this engine step, decided for the whole batch.

With many requests running the engine is bound by compute, and scoring draft tokens costs more
than the accepted ones save; in the long tail it is bound by memory traffic, and they are nearly
free. A gate sees the state of the engine only: where drafts come from is no concern of it.
"""

import bisect
from collections.abc import Mapping
from typing import Protocol

from sam_rollout.gating.step import EngineStep

LOOK = 2.0  # least chance that no token has: drafts are found and none is handed over


def hands_over(budget: int, least_chance: float) -> bool:
    """Whether a decision lets drafts be verified; a look only finds out what could be drafted."""
    return budget > 0 and least_chance < LOOK


class Gate(Protocol):
    """Sets the budget of draft tokens of every engine step."""

    @property
    def is_trial(self) -> bool:
        """Whether the last budget was given to learn about it, not because it seems the best."""
        ...

    @property
    def least_chance(self) -> float:
        """Least chance of a token under the last budget: drafts end before others; 0 for any."""
        ...

    @property
    def shape(self) -> int:
        """The place of the shape to draft, among the drafter's shapes; 0 where there is one."""
        ...

    def observe(self, step: EngineStep) -> None:
        """See what the step before did; called once per step, before `budget`."""
        ...

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """Most tokens that each request may draft now; 0 for none.

        Args:
            rows: requests running in this engine.
            whole: graphs admit steps without drafts and with the full k only.
            room: whether the next step can verify drafts. Where it cannot, the budget is a wish.
        """
        ...

    def drain(self) -> dict[str, float]:
        """What the gate did since the last call, by metric (`gate/...`); empty if it keeps none."""
        ...


class ScheduleGate:
    """A budget by the number of running requests alone: of the smallest bound not exceeded.

    Args:
        schedule: most requests -> draft tokens; above the largest bound nothing is drafted.
        k: most draft tokens of a request.
    """

    is_trial = False
    least_chance = 0.0
    shape = 0

    def __init__(self, schedule: Mapping[int, int], k: int) -> None:
        self._bounds = sorted(schedule)
        self._budgets = [schedule[bound] for bound in self._bounds] + [0]
        self._k = k

    def observe(self, step: EngineStep) -> None:
        """Do nothing: a schedule learns nothing."""

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """The budget of the smallest bound >= rows; the full k instead of any part of it."""
        if rows < 1:
            return 0
        budget = self._budgets[bisect.bisect_left(self._bounds, rows)]
        return self._k if whole and budget else budget

    def drain(self) -> dict[str, float]:
        """Return nothing: a schedule has no report."""
        return {}
