"""Says whether a single run learnt: accuracy over its steps, and the first against the last."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from sam_rollout.report.run_readers import load_run
from sam_rollout.report.runs import held_out_names
from sam_rollout.statistics import Estimate, change, t_width
from sam_rollout.telemetry.records import RunFolderError

WINDOW = 5  # steps at either end that are averaged; also the width of the running mean
TRAINING = "sam/rounds/accuracy_unfiltered"


@dataclass(frozen=True)
class LearningRow:
    """One accuracy (0 to 1): means of the first and last `window` values.

    `welch` and `bootstrap` estimate the difference, last - first; `p_value` is Welch's, two-sided.
    """

    title: str
    metric: str
    series: pd.Series  # index: training step
    window: int
    first: float
    last: float
    welch: Estimate
    bootstrap: Estimate
    p_value: float


@dataclass(frozen=True)
class Learning:
    """The accuracies of one run; `remarks` say what could not be shown."""

    label: str
    rows: list[LearningRow]
    remarks: list[str]


def learning(path: str | Path, window: int = WINDOW) -> Learning:
    """Training accuracy before filtering, and every held-out accuracy the run recorded.

    With fewer than 2 * `window` values the windows shrink to half of them. Raises RunFolderError
    if the folder cannot be read or no accuracy has the four values that the comparison needs.
    """
    run = load_run(path)
    names = [TRAINING] if TRAINING in run.steps else []
    rows, remarks = [], []
    for name in [*names, *held_out_names(run.steps)]:
        series = run.steps[name].dropna()
        if len(series) < 4:
            remarks.append(f"{name}: {len(series)} values, at least 4 are needed")
        else:
            rows.append(_row(name, series, window))
    if not rows:
        raise RunFolderError(
            f"{path}: expected at least 4 values of {TRAINING} or val-core/*/acc/mean@n in "
            "sam/train_steps.jsonl"
        )
    return Learning(run.label, rows, remarks)


def _row(name: str, series: pd.Series, window: int) -> LearningRow:
    window = min(window, len(series) // 2)
    first, last = series.to_numpy()[:window], series.to_numpy()[-window:]
    found = change(first, last)
    source = "before filtering" if name == TRAINING else name.split("/")[1]
    title = f"{'training' if name == TRAINING else 'held-out'} accuracy, {source}"
    means = float(first.mean()), float(last.mean())
    return LearningRow(
        title, name, series, window, *means, found.welch, found.bootstrap, found.p_value
    )


def running_band(series: pd.Series) -> pd.DataFrame:
    """Centred running mean and its 95 % band: columns mean, low, high, index as `series`.

    The noise of a step is estimated from differences of neighbours (Rice 1984), which a rising
    curve hardly affects; windows are shorter at the ends, so the band is wider there.
    """
    window = WINDOW if len(series) >= 4 * WINDOW else 3
    rolling = series.rolling(window, center=True, min_periods=1)
    mean, count = rolling.mean(), rolling.count()
    variance = float(np.mean(np.diff(series) ** 2) / 2)
    half = t_width((variance, len(series) - 1)) / np.sqrt(count)
    return pd.DataFrame({"mean": mean, "low": mean - half, "high": mean + half})
