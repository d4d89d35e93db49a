"""Decides whether a draft model is worth its forward passes (docs/gating.md).

There are two ways to draft: from texts alone, or from texts and the model. If the gate stays closed
while the model drafts, drafts from texts alone are tried.
"""

import math

from sam_rollout.core.limits import Limits
from sam_rollout.gating.step import EngineStep

_LEAD = 1.02  # a way to draft replaces the other way if it is faster by this factor
# A trial has at least _TRIAL_STEPS steps and _TRIAL_ROWS requests (a request counts once per step).
_TRIAL_STEPS, _TRIAL_ROWS = 32, 256
_FIRST_WAIT, _LONGEST_WAIT = 256, 8192  # steps between two trials: at first, and at most
# The first _SETTLING steps after a change of the way to draft are not measured. If an engine
# schedules one step ahead, it verifies the first drafts of the new way only in the fourth step.
_SETTLING = 3
_FORGOTTEN = 1 / 512  # share of earlier measurements that each new step replaces
_PAUSE = 4.0  # a step is not measured if its time exceeds the usual time by this factor
_CLOSED = 256  # after this number of successive steps with a closed gate, texts alone are tried

TEXTS, MODEL = 0, 1


class _Octave:
    def __init__(self) -> None:
        self.best = MODEL
        self.wait = _FIRST_WAIT
        self.waited = 0
        self.spent = [[0.0, 0.0], [0.0, 0.0]]  # for TEXTS and for MODEL: seconds, tokens

    def s_per_token(self, way: int) -> float:
        seconds, tokens = self.spent[way]
        return seconds / tokens if tokens else math.inf


class ModelPrice:
    """Chooses for each step whether the draft model runs."""

    def __init__(self, limits: Limits) -> None:
        self.pays = True  # whether the model should draft for the next step
        self._octaves = [_Octave() for _ in range(limits.max_rows.bit_length() + 1)]
        self._octave = self._octaves[0]
        self._last_ns = 0
        self._since_change = 0  # steps since the way to draft changed
        self._trial = [0, 0]  # steps and requests that a trial still needs
        self._closed = 0  # successive steps with a closed gate

    def observe(self, step: EngineStep, *, is_open: bool) -> None:
        """Learn from a step; choose whether the draft model runs in the next step.

        `is_open` says whether the gate was open for the step.
        """
        seconds, self._last_ns = (step.now_ns - self._last_ns) * 1e-9, step.now_ns
        rows = len(step.verified.sampled)
        if not rows:
            return
        octave = self._octaves[rows.bit_length()]
        if octave is not self._octave:
            self._octave, self._trial, self._closed = octave, [0, 0], 0
            self._choose(octave.best)
        self._since_change += 1
        way = MODEL if self.pays else TEXTS
        self._closed = 0 if is_open else self._closed + 1
        if self._closed >= _CLOSED and way == MODEL:
            octave.best, octave.waited = TEXTS, 0
            self._choose(TEXTS)
            return
        if not is_open:
            return
        steady = step.same_batch and 0 not in step.verified.sampled
        if steady and self._since_change > _SETTLING:
            self._count(octave.spent[way], seconds, int(step.verified.sampled.sum()))
            self._go_on(octave, rows)

    def expect_better(self) -> None:
        """Shorten the wait for a trial of the draft model, because the run has trained it."""
        for octave in self._octaves:
            if octave.best == TEXTS:
                octave.wait = _FIRST_WAIT

    def _count(self, spent: list[float], seconds: float, tokens: int) -> None:
        usual = spent[0] / spent[1] if spent[1] else seconds / tokens
        if seconds > _PAUSE * usual * tokens:
            return
        for place, value in enumerate((seconds, tokens)):
            spent[place] += value - spent[place] * _FORGOTTEN

    def _go_on(self, octave: _Octave, rows: int) -> None:
        """End a trial that has lasted long enough, or begin one after the wait."""
        steps, left = self._trial
        if steps > 0 or left > 0:
            self._trial = [steps - 1, left - rows]
            if max(self._trial) > 0:
                return
            tried = 1 - octave.best
            if octave.s_per_token(tried) * _LEAD < octave.s_per_token(octave.best):
                octave.best, octave.wait = tried, _FIRST_WAIT
            else:
                octave.wait = min(2 * octave.wait, _LONGEST_WAIT)
            octave.waited = 0
            self._choose(octave.best)
            return
        octave.waited += 1
        if octave.waited >= octave.wait:
            tried = 1 - octave.best
            octave.spent[tried] = [0.0, 0.0]  # policy and texts have changed since the last trial
            self._trial = [_TRIAL_STEPS, _TRIAL_ROWS]
            self._choose(tried)

    def _choose(self, way: int) -> None:
        if self.pays != (way == MODEL):
            self.pays, self._since_change = way == MODEL, 0
