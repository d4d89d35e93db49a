from functools import partial

import numpy as np
import pytest

from sam_rollout.core import statistics
from sam_rollout.core.statistics import Sides, difference, gain, mean, ratio_gain, share


def sides(base, sam, paired=False) -> Sides:
    base, sam = (np.atleast_2d(np.asarray(side, float)) for side in (base, sam))
    return Sides(base, sam, paired)


def test_steps_are_resampled_in_pairs():
    sam = np.arange(1.0, 41.0)
    sure = gain(sides(1.25 * sam, sam)).speed_up_minus_one
    assert (sure.low, sure.value, sure.high) == pytest.approx((0.25, 0.25, 0.25))
    noisy = gain(sides(1.25 * sam[::-1], sam))
    faster, saved = noisy.speed_up_minus_one, noisy.time_saved
    assert faster.low < 0 < 0.25 < faster.high
    assert saved.low == pytest.approx(1 - 1 / (1 + faster.low), rel=1e-3)
    assert gain(sides(1.25 * sam[::-1], sam)) == noisy


def test_one_step_of_one_run_has_no_interval():
    estimate = gain(sides([2.0], [1.0])).speed_up_minus_one
    assert (estimate.value, estimate.low, estimate.high) == (1.0, None, None)


def test_repeats_that_differ_widen_the_interval():
    slow, fast = np.full(8, 12.0), np.full(8, 10.0)
    alike = gain(sides([slow, slow], [fast, fast])).speed_up_minus_one
    assert (alike.low, alike.high) == pytest.approx((0.2, 0.2))
    apart = gain(sides([slow, fast], [fast, slow])).speed_up_minus_one
    assert apart.value == pytest.approx(0.0)
    assert apart.low < -0.15 and apart.high > 0.15


def test_equal_tokens_divide_both_sides():
    tokens = sides([100.0, 100.0], [50.0, 50.0])
    assert gain(sides([2.0, 2.0], [1.0, 1.0]), tokens).speed_up_minus_one.value == 0.0
    assert gain(sides([2.0, 2.0], [1.0, 1.0]), sides([0.0, 0.0], [1.0, 1.0])) is None


def test_interval_covers_the_true_ratio_about_as_often_as_it_says():
    generator = np.random.default_rng(1)
    covered = 0
    for _ in range(100):
        base, sam = np.array([[11.0], [10.0]]) + generator.normal(0.0, 1.0, size=(2, 30))
        estimate = gain(sides(base, sam)).speed_up_minus_one
        covered += estimate.low <= 0.1 <= estimate.high
    assert 85 <= covered <= 99


def test_difference_is_sam_minus_base():
    estimate = difference(sides([1.0, 2.0, 3.0], [2.0, 3.0, 4.0]))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((1.0, 1.0, 1.0))
    assert estimate.clear
    assert np.isnan(difference(sides(np.empty((1, 0)), np.empty((1, 0)))).value)


@pytest.mark.parametrize("paired", [False, True])
def test_three_repeats_are_enough_for_the_coverage_that_is_said(paired, monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", statistics._AT_ONCE)  # a faster bootstrap
    generator = np.random.default_rng(1)
    trials, covered = 400, 0
    for _ in range(trials):
        prompts = generator.normal(0.0, 0.3, size=(3 if paired else 1, 5))
        seed = generator.normal(0.0, 0.2, size=(3, 1)) if paired else 0.0
        between = generator.normal(0.0, 0.05, size=(2, 3, 1))
        within = generator.normal(0.0, 0.02, size=(2, 3, 5))
        base, sam = np.exp(prompts + seed + between + within)
        estimate = gain(sides(1.2 * base, sam, paired)).speed_up_minus_one
        covered += estimate.low <= 0.2 <= estimate.high
    assert 0.90 <= covered / trials <= 0.99


def test_what_the_seed_of_a_pair_does_cancels():
    times = np.array([[10.0, 12.0], [20.0, 24.0], [40.0, 48.0]])
    sure = gain(sides(1.25 * times, times, paired=True))
    assert (sure.speed_up_minus_one.low, sure.time_saved.high) == pytest.approx((0.25, 0.2))
    apart = gain(sides(1.25 * times, times)).speed_up_minus_one
    assert apart.low < 0 < 0.25 < apart.high
    shift = difference(sides(times, times + 1, paired=True))
    assert (shift.low, shift.value, shift.high) == pytest.approx((1.0, 1.0, 1.0))


def groups_of(rng, count: int, mean: float) -> tuple[np.ndarray, np.ndarray]:
    steps = rng.lognormal(5, 1.0, count)
    return steps * mean * rng.lognormal(-0.045, 0.3, count), steps


def ratio(rng, treated: int, control: int):
    return ratio_gain(groups_of(rng, treated, 1.8), groups_of(rng, control, 1.2))


def ratio_to_a_control_that_does_not_vary(rng):
    steps = rng.lognormal(5, 1.0, 8)
    return ratio_gain(groups_of(rng, 40, 1.7), (steps, steps))


@pytest.mark.parametrize(
    ("found", "truth"),
    [
        *((partial(ratio, treated=t, control=c), 0.5) for t, c in ((6, 3), (30, 6), (90, 10))),
        (ratio_to_a_control_that_does_not_vary, 0.7),
    ],
)
def test_the_interval_covers_the_truth_as_often_as_it_says(found, truth):
    rng = np.random.default_rng(1)
    estimates = [found(rng) for _ in range(800)]
    assert all(one.low < one.value < one.high for one in estimates)
    assert 0.92 <= np.mean([one.low <= truth <= one.high for one in estimates]) <= 0.98


@pytest.mark.parametrize("units", [0, 1])
def test_ratios_of_hardly_any_units_are_not_compared(units):
    assert ratio_gain((np.ones(units), np.ones(units)), (np.ones(2), np.ones(2))) is None


def test_a_share_has_wilsons_interval():
    """The first interval is that of Wilson (1927) for 3 of 10 at 95 %."""
    found = share(3, 10)
    assert (found.low, found.value, found.high) == pytest.approx((0.1078, 0.3, 0.6032), abs=1e-4)
    assert share(10, 10).high == pytest.approx(1.0)


def test_a_mean_covers_its_standard_error_and_is_repeatable():
    values = np.random.default_rng(1).random(400)
    found = mean(values)
    error = values.std(ddof=1) / np.sqrt(len(values))
    assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert found.low < found.value < found.high
    assert mean(values) == found


@pytest.mark.parametrize("values", [[0.5], [0.25, 0.25, 0.25]])
def test_values_that_do_not_vary_have_a_point_for_an_interval(values):
    found = mean(values)
    assert found.low == found.value == found.high == values[0]
