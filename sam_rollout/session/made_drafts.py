"""When drafts that a model makes beside the session are asked for, and taken."""

from __future__ import annotations

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.gating import EngineStep
from sam_rollout.gating.model_price import ModelPrice
from sam_rollout.session.adapter import EngineHooks
from sam_rollout.sources.model import ModelSourceConfig

# A closed gate looks at what could be drafted now and then. Where that takes a model's passes, they
# are run in so many of the next steps: gates decide every few steps (`gating/auto.py`).
_LOOK_AHEAD = 8


class MadeDrafts:
    """Asks for such drafts while the gate is open and they are worth their price.

    Args:
        config: of the source `model`.
        hooks: of the engine.
        price: tells whether the model's passes pay; None where nothing measures it.

    Attributes:
        wanted: whether the last step that was seen called for them, the next time.
    """

    def __init__(
        self, config: ModelSourceConfig, hooks: EngineHooks, price: ModelPrice | None
    ) -> None:
        self.wanted = False
        self._expected, self._trains = config.enabled, config.trains
        self._made, self._made_after = hooks.made, hooks.made_after
        self._price = price
        self._asked = 0  # steps in a row after which they were wanted
        self._lacking = False  # in this step
        self._looks_ahead = 0  # steps for which a look waits for them

    def take(self) -> tuple[Int32Array, np.ndarray | None] | None:
        """The drafts for this step, if there are any."""
        made = self._made()
        # They were not asked for, or are on their way. Drafts that were asked for and did not come
        # cannot be had, and a look does not wait for drafts that cost more than they bring.
        self._lacking = (
            self._expected
            and made is None
            and self._asked < self._made_after
            and (self._price is None or self._price.pays)
        )
        return made

    def ask(self, step: EngineStep, *, was_open: bool, is_open: bool, looks: bool) -> bool:
        """Decide whether they are wanted the next time; return whether a look has to wait for them.

        Args:
            step: as the gate saw it.
            was_open, is_open: whether drafts were to be verified in it, and are to be in the next.
            looks: the gate wants to find out what could be drafted, and hands nothing over.
        """
        self._looks_ahead -= self._looks_ahead > 0
        waits = looks and self._lacking  # it would find less than there can be
        if waits:
            self._looks_ahead = _LOOK_AHEAD
        self.wanted = is_open or self._looks_ahead > 0
        if self._price is not None:
            self._price.observe(step, is_open=was_open)
            self.wanted = self.wanted and self._price.pays
        self._asked = (self._asked + 1) * self.wanted
        return waits

    def end_step(self) -> None:
        """A training step has ended: a model that the run trains may be worth more from here on."""
        if self._price is not None and self._trains:
            self._price.expect_better()
