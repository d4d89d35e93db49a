"""Gains and differences with bootstrap intervals over repeats and steps.

Runs hold steps, and the same step has the same prompts in every run of a seed. So a draw takes
repeats of each side with replacement, then steps with replacement, the same steps for all runs (a
bootstrap of two crossed factors: Owen, The pigeonhole bootstrap, 2007). Where a side has one run
only, its repeats cannot be drawn, and the interval holds the noise within the run alone.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

RESAMPLES = 10_000
SEED = 0  # the same runs give the same intervals
CONFIDENCE = 0.95
_AT_ONCE = 1_000  # draws; bounds the memory that long runs take


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; no interval where nothing can be resampled."""

    value: float
    low: float | None
    high: float | None

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and self.high is not None and not self.low <= 0 <= self.high


@dataclass(frozen=True)
class Gain:
    """One ratio of times in its two named forms, as fractions (0.1 = 10 %)."""

    speed_up_minus_one: Estimate
    time_saved: Estimate


@dataclass(frozen=True)
class Sides:
    """One figure of both sides: arrays [runs of the side, steps], without NaN."""

    base: np.ndarray
    sam: np.ndarray

    @property
    def shape(self) -> tuple[int, int, int]:
        """Runs of BASE, runs of SAM, steps."""
        return len(self.base), len(self.sam), self.base.shape[1]

    def means(self) -> tuple[float, float]:
        """Mean over runs of each side's sum over steps."""
        return self.base.sum() / len(self.base), self.sam.sum() / len(self.sam)


def gain(time_s: Sides, tokens: Sides | None = None) -> Gain | None:
    """Gain in time, or in time per token, both summed over steps; None if a sum is zero."""
    base_s, sam_s = time_s.means()
    base_tokens, sam_tokens = tokens.means() if tokens else (1.0, 1.0)
    if not all((base_s, sam_s, base_tokens, sam_tokens)):
        return None
    value = (base_s / base_tokens) / (sam_s / sam_tokens)
    draws = np.concatenate(
        [
            _ratio(_sums(time_s, weights), _sums(tokens, weights) if tokens else None)
            for weights in _weights(*time_s.shape)
        ]
    )
    draws = draws[np.isfinite(draws) & (draws > 0)]
    return Gain(
        _estimate(value - 1, draws - 1, time_s.shape),
        _estimate(1 - 1 / value, 1 - 1 / draws, time_s.shape),
    )


def difference(values: Sides) -> Estimate:
    """Mean over steps of SAM - BASE; NaN if there is no step."""
    count = values.shape[2]
    if not count:
        return Estimate(math.nan, None, None)
    base, sam = values.means()
    draws = []
    for weights in _weights(*values.shape):
        base_sums, sam_sums = _sums(values, weights)
        draws.append((sam_sums - base_sums) / count)
    return _estimate((sam - base) / count, np.concatenate(draws), values.shape)


# [draws, runs of BASE], [draws, runs of SAM], [draws, steps]
_Weights = tuple[np.ndarray, np.ndarray, np.ndarray]


def _weights(*shape: int) -> Iterator[_Weights]:
    """How often each run and step is drawn, `_AT_ONCE` draws at a time, the same every time."""
    for block in range(RESAMPLES // _AT_ONCE):
        yield tuple(  # type: ignore[misc]
            _drawn(count, seed, block) for seed, count in enumerate(shape, start=SEED)
        )


@lru_cache(maxsize=64)  # every row of a comparison draws the same
def _drawn(count: int, seed: int, block: int) -> np.ndarray:
    generator = np.random.default_rng([seed, block])
    drawn = generator.multinomial(count, [1 / count] * count, size=_AT_ONCE)
    drawn.setflags(write=False)
    return drawn


def _sums(values: Sides, weights: _Weights) -> tuple[np.ndarray, np.ndarray]:
    """Mean over drawn runs of the sum over drawn steps, both sides, [draws]."""
    of_base, of_sam, of_steps = weights
    sides = ((values.base, of_base), (values.sam, of_sam))
    base, sam = (((runs @ side) * of_steps).sum(axis=1) / len(side) for side, runs in sides)
    return base, sam


def _ratio(
    time_s: tuple[np.ndarray, np.ndarray], tokens: tuple[np.ndarray, np.ndarray] | None
) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = time_s[0] / time_s[1]
        return ratio if tokens is None else ratio * tokens[1] / tokens[0]


def _estimate(value: float, draws: np.ndarray, shape: tuple[int, int, int]) -> Estimate:
    base_runs, sam_runs, steps = shape
    resampled = steps > 1 or min(base_runs, sam_runs) > 1
    if not resampled or not len(draws):
        return Estimate(value, None, None)
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [outside, 1 - outside])
    return Estimate(value, float(low), float(high))
