"""Decides when the engine's own drafter (the model) runs, and takes in the model's drafts."""

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.gating import EngineStep
from sam_rollout.gating.model_price import ModelPrice
from sam_rollout.session.adapter import EngineHooks
from sam_rollout.sources.model import ModelSourceConfig

# A closed gate sometimes makes a look: drafts are found but not handed over. If the model's drafts
# are missing, the look is postponed, and the model runs for `_LOOK_AHEAD` steps, so that its drafts
# exist when the gate decides again.
_LOOK_AHEAD = 8


class MadeDrafts:
    """Asks for the model's drafts while the gate is open and `price` says that the model pays."""

    def __init__(
        self, config: ModelSourceConfig, hooks: EngineHooks, price: ModelPrice | None
    ) -> None:
        self.wanted = False  # whether the model should draft in the next step
        self._expected, self._trains = config.enabled, config.trains
        self._made, self._made_after = hooks.made, hooks.made_after
        self._price = price
        self._asked = 0  # number of successive steps, up to the last one, that wanted drafts
        self._lacking = False  # whether this step lacks drafts that a later step may have
        self._looks_ahead = 0  # further steps in which the model runs for a look

    def take(self) -> tuple[Int32Array, np.ndarray | None] | None:
        """Take the drafts for this step, if there are any."""
        made = self._made()
        # A look is postponed if the model is worth its passes and its drafts may still come.
        self._lacking = (
            self._expected
            and made is None
            and self._asked < self._made_after
            and (self._price is None or self._price.pays)
        )
        return made

    def ask(self, step: EngineStep, *, was_open: bool, is_open: bool, looks: bool) -> bool:
        """Decide whether the model drafts next; return whether a look is postponed.

        Args:
            step: the engine step that the gate has just observed.
            was_open, is_open: whether the gate was open for this step, and is open for the next.
            looks: whether the gate wants drafts to be found but not verified.
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
        """After a training step, try a model's drafts again if the run trains the model."""
        if self._price is not None and self._trains:
            self._price.expect_better()
