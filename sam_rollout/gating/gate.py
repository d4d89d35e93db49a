"""Gates decide how many tokens each request may draft in an engine step."""

import bisect
from collections.abc import Mapping

from sam_rollout.gating.step import EngineStep

# No token reaches this minimum chance of acceptance. So drafts are made and counted, but none is
# handed over to the engine.
LOOK = 2.0


def hands_over(budget: int, least_chance: float) -> bool:
    """Return whether the engine gets drafts; with LOOK, drafts are only counted."""
    return budget > 0 and least_chance < LOOK


class Gate:
    """Base class of the gates."""

    is_trial = False  # whether the last budget was chosen only to learn from the step
    least_chance = 0.0  # a draft ends before a token with a lower chance of acceptance
    shape = 0  # the shape to draft, as an index into `SamDrafter.shapes`

    def next_budget(self, step: EngineStep, *, whole: bool = False, room: bool = True) -> int:
        """Learn from a step, and decide on the next step; arguments as for `budget`."""
        self.observe(step)
        return self.budget(len(step.verified.sampled), whole=whole, room=room)

    def observe(self, step: EngineStep) -> None:
        """Learn from the previous step; called once per step, before `budget`."""

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """Return the largest number of tokens that each request may draft now.

        Args:
            whole: whether the engine's graphs only allow 0 or k draft tokens per request.
            room: whether the next step can verify drafts. If it cannot, the result is the number of
                tokens that would be drafted.
        """
        raise NotImplementedError

    def drain(self) -> dict[str, float]:
        """Return the gate's counts since the last call, by metric (`gate/...`)."""
        return {}


class ScheduleGate(Gate):
    """A gate whose budget depends only on the number of running requests.

    `schedule` maps numbers of requests to draft tokens per request. With n running requests, the
    entry with the smallest number >= n applies. Without such an entry, nothing is drafted.
    """

    def __init__(self, schedule: Mapping[int, int], k: int) -> None:
        self._bounds = sorted(schedule)
        self._budgets = [schedule[bound] for bound in self._bounds] + [0]
        self._k = k

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """Return the schedule's budget for this number of requests; with `whole`, return 0 or k."""
        if rows < 1:
            return 0
        budget = self._budgets[bisect.bisect_left(self._bounds, rows)]
        return self._k if whole and budget else budget
