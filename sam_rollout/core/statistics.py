"""Computes confidence intervals of gains and differences between runs, of ratios, and of shares.

A comparison has two sides, BASE and SAM. The runs of both sides have the same number of steps. A
bootstrap draw takes runs of each side with replacement, and then steps with replacement, the same
steps for all runs. This is a bootstrap of two crossed factors (Owen, The pigeonhole bootstrap,
2007). A run of BASE and a run of SAM with the same seed are drawn as a pair.

The bootstrap's interval is too narrow for two or three runs. It is therefore widened to include a
t-interval of the runs' totals: Student's for paired runs, otherwise Welch's. If a side has a single
run, the interval covers only the noise within runs.

scipy.stats takes a second to import, so it is imported inside functions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 10_000
SEED = 0  # a fixed seed, so that the same runs give the same intervals
CONFIDENCE = 0.95
_AT_ONCE = 1_000  # number of draws made at a time; the limit bounds the memory for long runs


@dataclass(frozen=True)
class Estimate:
    """A value with the ends of its 95 % interval, which are None if nothing can be resampled."""

    value: float
    low: float | None
    high: float | None

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Gain:
    """A gain in time, as a speed-up and as a share of time saved; 0.1 means 10 %."""

    speed_up_minus_one: Estimate
    time_saved: Estimate


@dataclass(frozen=True)
class Sides:
    """The values of a metric on each side, as arrays [runs of the side, steps] without NaN.

    `paired` means that run n of BASE and run n of SAM have the same seed, which no other run has.
    """

    base: np.ndarray
    sam: np.ndarray
    paired: bool = False

    @property
    def shape(self) -> tuple[int, int, int]:
        """The numbers of BASE's runs, of SAM's runs, and of steps."""
        return len(self.base), len(self.sam), self.base.shape[1]

    def means(self) -> tuple[float, float]:
        """Return each side's sum over steps, averaged over its runs."""
        return self.base.sum() / len(self.base), self.sam.sum() / len(self.sam)

    def totals(self) -> tuple[np.ndarray, np.ndarray]:
        """Return each run's sum over steps, as arrays [runs of BASE] and [runs of SAM]."""
        return self.base.sum(axis=1), self.sam.sum(axis=1)


def gain(time_s: Sides, tokens: Sides | None = None) -> Gain | None:
    """Return SAM's gain in time, or in time per token if `tokens` is given; None if a sum is 0."""
    base_s, sam_s = time_s.means()
    base_tokens, sam_tokens = tokens.means() if tokens else (1.0, 1.0)
    if not all((base_s, sam_s, base_tokens, sam_tokens)):
        return None
    value = (base_s / base_tokens) / (sam_s / sam_tokens)
    base, sam = _drawn_sums(time_s)
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = base / sam
        if tokens:
            base, sam = _drawn_sums(tokens)
            draws = draws * sam / base
    draws = draws[np.isfinite(draws) & (draws > 0)]
    of_runs = _log_ratios(time_s, tokens)
    width = _t_width(*of_runs, time_s.paired) if of_runs else None
    factors = np.exp([-width, width]) * value if width is not None else np.empty(0)
    return Gain(
        _estimate(value - 1, draws - 1, time_s.shape, factors - 1),
        _estimate(1 - 1 / value, 1 - 1 / draws, time_s.shape, 1 - 1 / factors),
    )


def difference(values: Sides) -> Estimate:
    """Return the mean of SAM - BASE over the steps; NaN if there is no step."""
    count = values.shape[2]
    if not count:
        return Estimate(math.nan, None, None)
    base, sam = values.means()
    drawn_base, drawn_sam = _drawn_sums(values)
    value, width = (sam - base) / count, _t_width(*values.totals(), values.paired)
    ends = value + np.array([-width, width]) / count if width is not None else np.empty(0)
    return _estimate(value, (drawn_sam - drawn_base) / count, values.shape, ends)


def _log_ratios(time_s: Sides, tokens: Sides | None) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the logarithms of the runs' times, or of their times per token; None if a sum is 0."""
    times = time_s.totals()
    made = tokens.totals() if tokens else (np.ones(len(times[0])), np.ones(len(times[1])))
    if min(side.min() for side in (*times, *made)) <= 0:
        return None
    base, sam = (np.log(time / count) for time, count in zip(times, made, strict=True))
    return base, sam


def _t_width(base: np.ndarray, sam: np.ndarray, paired: bool) -> float | None:
    """Return half the t-interval's width for a difference of means; None if a side has one run."""
    if min(len(base), len(sam)) < 2:
        return None
    parts = [base - sam] if paired else [base, sam]
    return t_width(*((part.var(ddof=1) / len(part), len(part) - 1) for part in parts))


def t_width(*parts: tuple[float, float]) -> float:
    """Return half the width of the t-interval of a sum of independent estimates.

    `parts` has the squared standard error and the degrees of freedom of each estimate. For one
    estimate the interval is Student's, for several it is Welch's.
    """
    variance = sum(part for part, _ in parts)
    if not variance:
        return 0.0  # all values agree to the last digit
    from scipy import stats

    freedom = variance**2 / sum(part**2 / count for part, count in parts)
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom) * math.sqrt(variance))


def _drawn_sums(values: Sides) -> np.ndarray:
    """Return both sides' sums over drawn steps, averaged over drawn runs, [2, RESAMPLES]."""
    base_runs, sam_runs, steps = values.shape
    parts = []
    for block in range(RESAMPLES // _AT_ONCE):
        of_base, of_steps = _drawn(base_runs, SEED, block), _drawn(steps, SEED + 2, block)
        of_sam = of_base if values.paired else _drawn(sam_runs, SEED + 1, block)
        sides = ((values.base, of_base), (values.sam, of_sam))
        parts.append([((runs @ side) * of_steps).sum(axis=1) / len(side) for side, runs in sides])
    return np.concatenate(parts, axis=1)


@lru_cache(maxsize=32)  # all metrics of a comparison use the same draws
def _drawn(count: int, seed: int, block: int) -> np.ndarray:
    generator = np.random.default_rng([seed, block])
    drawn = generator.multinomial(count, [1 / count] * count, size=_AT_ONCE).astype(np.int16)
    drawn.setflags(write=False)
    return drawn


def _estimate(
    value: float, draws: np.ndarray, shape: tuple[int, int, int], also: np.ndarray
) -> Estimate:
    """Return the value with its bootstrap draws' interval, widened to include those in `also`."""
    base_runs, sam_runs, steps = shape
    resampled = steps > 1 or min(base_runs, sam_runs) > 1
    if not resampled or not len(draws):
        return Estimate(value, None, None)
    ends = [*_percentiles(draws), *also]
    return Estimate(value, float(min(ends)), float(max(ends)))


def _percentiles(draws: np.ndarray) -> tuple[float, float]:
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [outside, 1 - outside])
    return float(low), float(high)


def mean(values: Sequence[float] | np.ndarray) -> Estimate:
    """Return the mean of independent values with its bootstrap interval."""
    data = np.asarray(values, float)
    value = float(data.mean())
    if np.ptp(data) == 0:
        return Estimate(value, value, value)
    blocks = range(RESAMPLES // _AT_ONCE)
    sums = np.concatenate([_drawn(len(data), SEED, block) @ data for block in blocks])
    return Estimate(value, *_percentiles(sums / len(data)))


def share(right: int, total: int) -> Estimate:
    """Return the share ``right / total`` with Wilson's score interval."""
    from scipy.stats import binomtest

    interval = binomtest(right, total).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(right / total, float(interval.low), float(interval.high))


Sums = tuple[np.ndarray, np.ndarray]  # numerators and denominators, float [units] each


def ratio_gain(treated: Sums, control: Sums) -> Estimate | None:
    """Compare two ratios of sums over independent units.

    The interval is Welch's t-interval of the difference of the ratios' logarithms. A jackknife over
    units gives the variances. The degrees of freedom are the effective number of units minus 1; the
    effective number follows from the units' denominators. With the plain linearised variance, the
    interval would contain the true value too seldom if a few long units dominate (simulation in
    `tests/unit/test_statistics.py`).

    Returns:
        (ratio of the treated) / (ratio of the control) - 1; None if a side has fewer than two units
        with a positive denominator, or if the sum of these units' numerators is not positive.
    """
    arm, other = (_log_ratio(*arm) for arm in (treated, control))
    if arm is None or other is None:
        return None
    log, width = arm[0] - other[0], t_width(arm[1:], other[1:])
    return Estimate(math.expm1(log), math.expm1(log - width), math.expm1(log + width))


def _log_ratio(numerator: np.ndarray, denominator: np.ndarray) -> tuple[float, float, float] | None:
    """Return the logarithm of a ratio of sums, its variance and its degrees of freedom."""
    used = denominator > 0
    numerator, denominator = numerator[used].astype(float), denominator[used].astype(float)
    units = len(numerator)
    if units < 2 or not numerator.sum() > 0:
        return None
    value, weight = numerator.sum() / denominator.sum(), denominator / denominator.sum()
    left_out = (numerator - value * denominator) / (1 - weight) / numerator.sum()
    variance = float((left_out**2).sum() * (units - 1) / units)
    return math.log(value), variance, max(1 / float((weight**2).sum()) - 1, 1.0)
