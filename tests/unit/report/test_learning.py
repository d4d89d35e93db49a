"""First against last steps of one run."""

import numpy as np
import pandas as pd
import pytest

from sam_rollout.report.learning import TRAINING, learning, running_band
from sam_rollout.telemetry.records import RunFolderError

HELD_OUT = "val-core/gsm8k/acc/mean@1"


def test_first_and_last_five_by_hand(make_run):
    values = [0.1, 0.2, 0.1, 0.2, 0.1, 0.9, 0.5, 0.6, 0.5, 0.6, 0.5]
    run = make_run("run", {step: {TRAINING: value} for step, value in enumerate(values)})
    (row,) = learning(run).rows
    assert (row.first, row.last, row.welch.value) == pytest.approx((0.14, 0.54, 0.4))
    # Both windows have variance 0.003, so Welch is Student with 8 degrees of freedom.
    half = 2.306 * (2 * 0.003 / 5) ** 0.5
    welch, bootstrap = row.welch, row.bootstrap
    assert (welch.low, welch.high) == pytest.approx((0.4 - half, 0.4 + half), abs=1e-4)
    assert welch.low < bootstrap.low < 0.4 < bootstrap.high < welch.high
    assert row.p_value < 1e-4


def test_sparse_held_out_values_shrink_the_window(make_run):
    steps = {step: {TRAINING: 0.3} for step in range(1, 13)}
    for step, value in ((1, 0.1), (4, 0.2), (8, 0.3), (12, 0.4)):
        steps[step][HELD_OUT] = value
    training, held_out = learning(make_run("run", steps)).rows
    assert (held_out.window, held_out.first, held_out.last) == pytest.approx((2, 0.15, 0.35))
    assert list(held_out.series.index) == [1, 4, 8, 12]
    assert (training.welch.value, training.p_value) == (0.0, 1.0)


def test_too_few_values_are_remarked_or_refused(make_run):
    steps = {step: {TRAINING: 0.1 * step} for step in range(1, 5)}
    steps[1][HELD_OUT] = 0.1
    result = learning(make_run("some", steps))
    assert result.remarks == [f"{HELD_OUT}: 1 values, at least 4 are needed"]
    with pytest.raises(RunFolderError, match="expected at least 4 values of"):
        learning(make_run("none", {1: {TRAINING: 0.1}}))


def test_band_follows_the_noise_and_not_the_trend():
    generator = np.random.default_rng(0)
    trend = pd.Series(np.linspace(0.0, 0.5, 400))
    band = running_band(trend + generator.normal(0, 0.02, 400))
    half = (band["high"] - band["low"]) / 2
    assert half[5:-5].to_numpy() == pytest.approx(1.966 * 0.02 / 5**0.5, rel=0.1)
    inside = (band["low"] < trend) & (trend < band["high"])
    assert 0.9 < inside[5:-5].mean() < 0.99
