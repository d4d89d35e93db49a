"""Contains worker extensions that fail on purpose, in a weight sync or in training step 2."""

import itertools
from typing import Any

from sam_rollout.integrations.verl.worker_extension import SamColocateWorkerExtension

# The server calls `sam_drain` after its warm-up, after the first weight sync, and then once per
# training step.
DRAINS_BEFORE_STEP_TWO = 3
STEPS_INTO_STEP_TWO = 20


class RefusingExtension(SamColocateWorkerExtension):
    def _update_weights(self, *args: Any, **kwargs: Any) -> Any:
        self._syncs = getattr(self, "_syncs", 0) + 1
        if self._syncs == 3:
            raise ValueError("these weights are not wanted")
        return super()._update_weights(*args, **kwargs)


class BreakingExtension(SamColocateWorkerExtension):
    def sam_drain(self, *going_on: Any) -> dict[str, Any] | None:
        self._drains = getattr(self, "_drains", 0) + 1
        if self._drains == DRAINS_BEFORE_STEP_TWO:
            self._break_drafter()
        return super().sam_drain(*going_on)

    def _break_drafter(self) -> None:
        """Make the drafter raise an error after ``STEPS_INTO_STEP_TWO`` more engine steps."""
        drafter, served = self._proposer().session.drafter, itertools.count()
        original = drafter.draft

        def draft(*args: Any, **kwargs: Any) -> Any:
            if next(served) == STEPS_INTO_STEP_TWO:
                raise RuntimeError("broken on purpose")
            return original(*args, **kwargs)

        drafter.draft = draft
