"""Decides when the draft model runs, and takes its drafts from the engine."""

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.gating import EngineStep
from sam_rollout.gating.model_price import ModelPrice
from sam_rollout.session.adapter import EngineHooks
from sam_rollout.sources.model import ModelSourceConfig

# A closed gate sometimes makes a look: a step for which drafts are made and counted, but not handed
# over to the engine. If the draft model's drafts are missing then, the look is postponed, and the
# model runs for `_LOOK_AHEAD` steps, so that its drafts exist when the gate decides again.
_LOOK_AHEAD = 8


class MadeDrafts:
    """Asks for the model's drafts if they pay and if an open gate or a look needs them."""

    def __init__(
        self, config: ModelSourceConfig, hooks: EngineHooks, price: ModelPrice | None
    ) -> None:
        self.wanted = False  # whether the draft model should run in the next step
        self._expected, self._trains = config.enabled, config.trains
        self._made, self._made_after = hooks.made, hooks.made_after
        self._price = price
        # Number of consecutive steps, up to the last step, in which drafts were wanted.
        self._asked = 0
        self._lacking = False  # whether the model's drafts are missing, but may come later
        self._looks_ahead = 0  # number of further steps in which the model runs because of a look

    def take(self) -> tuple[Int32Array, np.ndarray | None] | None:
        """Take the draft model's drafts for this step from the engine; None if there are none."""
        made = self._made()
        self._lacking = (
            self._expected
            and made is None
            and self._asked < self._made_after
            and (self._price is None or self._price.pays)
        )
        return made

    def ask(self, step: EngineStep, *, was_open: bool, is_open: bool, looks: bool) -> bool:
        """Decide whether the draft model runs in the next step; return whether a look is postponed.

        `was_open` and `is_open` say whether the gate was open for this step, and is open for the
        next step. `looks` says whether the gate wants a look.
        """
        self._looks_ahead -= self._looks_ahead > 0
        waits = looks and self._lacking
        if waits:
            self._looks_ahead = _LOOK_AHEAD
        self.wanted = is_open or self._looks_ahead > 0
        if self._price is not None:
            self._price.observe(step, is_open=was_open)
            self.wanted = self.wanted and self._price.pays
        self._asked = (self._asked + 1) * self.wanted
        return waits

    def end_step(self) -> None:
        """End a training step: if the run trains the draft model, try its drafts again soon."""
        if self._price is not None and self._trains:
            self._price.expect_better()
