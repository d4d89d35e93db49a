"""Compares each training step with the same step of a finished run, the baseline."""

import math
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from sam_rollout.telemetry.records import RunFolder, RunFolderError

_ROLLOUT_S, _TOKENS = "sam/engine/rollout_s", "sam/engine/generation_tokens"
# Each row has a metric of both runs, the metric that shows the baseline's value, and the metric
# that shows the quotient (None if no quotient is shown).
_METRICS: tuple[tuple[str, str, str | None], ...] = (
    (_ROLLOUT_S, "compare/rollout_s_baseline", "compare/speedup_rollout"),
    ("sam/tail/time_s", "compare/tail_time_baseline", "compare/speedup_tail"),
    ("timing_s/step", "compare/step_s_baseline", "compare/speedup_step"),
    ("response_length/mean", "compare/response_length_baseline", None),
    ("critic/rewards/mean", "compare/reward_baseline", None),
    ("training/rollout_probs_diff_mean", "compare/probs_diff_baseline", None),
)
_SO_FAR, _EQUAL_TOKENS = "compare/speedup_rollout_so_far", "compare/gain_at_equal_tokens"


class Baseline:
    """The metrics of a finished run, by training step.

    Args:
        path: The finished run's folder.
        earlier: If the current run was resumed, the metrics of its earlier steps.

    Raises:
        RunFolderError: `path` is no run folder, or has no training step.
    """

    def __init__(
        self, path: str | Path, earlier: Mapping[int, Mapping[str, float]] | None = None
    ) -> None:
        folder = RunFolder(path)
        self.start = folder.read_starts()[0]
        known = {step: _finite(metrics) for step, metrics in folder.read_train_steps().items()}
        self._steps = {step: metrics for step, metrics in known.items() if metrics.get(_ROLLOUT_S)}
        if not self._steps:
            raise RunFolderError(f"{folder.train_steps_path}: no training step with {_ROLLOUT_S}")
        own_s = {step: _finite(own).get(_ROLLOUT_S) for step, own in (earlier or {}).items()}
        self._own_s = {step: seconds for step, seconds in own_s.items() if seconds}

    def metrics(self, step: int, own: Mapping[str, Any]) -> dict[str, float]:
        """Return the metrics `compare/*` of a training step; empty if the baseline lacks the step.

        Call this for every step, because one of the metrics sums up all steps so far.
        """
        theirs = self._steps.get(step)
        if theirs is None:
            return {}
        own = _finite(own)
        values: dict[str, float] = {}
        for name, copied, ratio in _METRICS:
            if name not in theirs:
                continue
            values[copied] = theirs[name]
            if ratio is not None and own.get(name):
                values[ratio] = theirs[name] / own[name]
        if own.get(_ROLLOUT_S):
            self._own_s[step] = own[_ROLLOUT_S]
            # If a resumed run repeats steps, later steps may have values from before the resume.
            # These values are left out.
            compared = [one for one in self._own_s if one <= step and one in self._steps]
            theirs_s = sum(self._steps[one][_ROLLOUT_S] for one in compared)
            values[_SO_FAR] = theirs_s / sum(self._own_s[one] for one in compared)
            if own.get(_TOKENS) and theirs.get(_TOKENS):
                per_token_s = theirs[_ROLLOUT_S] / theirs[_TOKENS]
                values[_EQUAL_TOKENS] = per_token_s * own[_TOKENS] / own[_ROLLOUT_S] - 1
        return values


def _finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in metrics.items()
        if isinstance(value, Real) and math.isfinite(value)
    }
