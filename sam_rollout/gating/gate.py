"""Gates decide, for the whole batch, how many tokens each request may draft in an engine step."""

import bisect
from collections.abc import Mapping

from sam_rollout.gating.step import EngineStep

# A minimum chance that no token reaches: the drafter finds drafts, but none is verified.
LOOK = 2.0


def hands_over(budget: int, least_chance: float) -> bool:
    """Whether a decision lets drafts be verified; with LOOK, drafts are only found and counted."""
    return budget > 0 and least_chance < LOOK


class Gate:
    """Base class of the gates, which set every engine step's budget of draft tokens."""

    is_trial = False  # whether the last budget was chosen only to learn from its step
    least_chance = 0.0  # drafts end before tokens with a lower chance of acceptance
    shape = 0  # index of the shape to draft in `SamDrafter.shapes`

    def observe(self, step: EngineStep) -> None:
        """Take in the previous step; called once per step, before `budget`."""

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """Return the largest number of tokens that each request may draft now.

        Args:
            rows: requests running in this engine.
            whole: whether the engine's graphs only allow 0 or k draft tokens per request.
            room: whether the next step can verify drafts. If not, the result says how much would be
                drafted.
        """
        raise NotImplementedError

    def drain(self) -> dict[str, float]:
        """Return the gate's counts since the last call, by metric (`gate/...`)."""
        return {}


class ScheduleGate(Gate):
    """A budget that depends only on the number of running requests.

    `schedule` maps numbers of requests to draft tokens per request. An entry applies up to its
    number of requests. Beyond the largest number, nothing is drafted.
    """

    def __init__(self, schedule: Mapping[int, int], k: int) -> None:
        self._bounds = sorted(schedule)
        self._budgets = [schedule[bound] for bound in self._bounds] + [0]
        self._k = k

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """Return the budget of the smallest bound >= `rows`; with `whole`, return 0 or k."""
        if rows < 1:
            return 0
        budget = self._budgets[bisect.bisect_left(self._bounds, rows)]
        return self._k if whole and budget else budget
