"""Decides whether a drafting model is worth its forward passes (docs/gating.md).

If the gate stays closed while the model may draft, drafts from texts alone are tried.
"""

import math

from sam_rollout.core.limits import Limits
from sam_rollout.gating.step import EngineStep

_LEAD = 1.02  # the other way (with or without the model) takes over if faster by this factor
_TRIAL_STEPS, _TRIAL_ROWS = 32, 256  # a trial's least steps, and rows (requests * steps)
_FIRST_WAIT, _LONGEST_WAIT = 256, 8192  # steps from one trial to the next: at first, and at most
# After a change to or from the model, this many steps are not measured. An engine that schedules a
# step ahead verifies the first drafts of the new way only in the fourth step.
_SETTLING = 3
_FORGOTTEN = 1 / 512  # share of the earlier measurements that a new step replaces
_PAUSE = 4.0  # a step that takes this many times as long as usual is left out
_CLOSED = 256  # number of successive steps with a closed gate after which texts alone are tried

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
    """Chooses, step by step, whether the model drafts."""

    def __init__(self, limits: Limits) -> None:
        self.pays = True  # whether the model should draft for the next step
        self._octaves = [_Octave() for _ in range(limits.max_rows.bit_length() + 1)]
        self._octave = self._octaves[0]
        self._last_ns = 0
        self._since_change = 0  # steps
        self._trial = [0, 0]  # steps and rows that are left of a trial
        self._closed = 0  # successive steps with a closed gate

    def observe(self, step: EngineStep, *, is_open: bool) -> None:
        """Learn from a step, whose gate was open or not (`is_open`); choose for the next step."""
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
        """Try the model soon again, because it has been trained since its last trial."""
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
