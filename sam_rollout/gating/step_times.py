"""Learns from an engine's steps how long the next step will take (docs/gating.md).

The expected time of a step is `speed * base * correction`:

* `base` is a linear function (the line) of scored tokens, draft tokens and context tokens. It is
  fitted by least squares, with less weight for older steps. Residuals are relative to the step's
  time, because otherwise large batches would outweigh small batches.
* `correction` is the ratio of measured times to `base` in a cell. A cell holds the steps with about
  the same number of requests and about the same number of draft tokens per request. An empty cell
  takes its correction from the cells with the same number of requests. If those cells are empty,
  too, the correction is 1.
* `speed` follows what slows all steps down, such as another program on the machine. It is also
  pulled back to 1, because otherwise `speed` and `base` could drift in opposite directions.
"""

import math
from collections.abc import Sequence

import numpy as np

from sam_rollout.core.limits import Limits

_FEATURES = 4  # number of features: the constant 1, scored tokens, draft tokens, context tokens
_RIDGE = (1e-6, 1e-6, 1e-3, 1e-6)
_MEMORY = 2000  # number of steps after which a step's weight in the line has fallen to 1/e
_CELL_MEMORY = 64  # a cell's sums are halved when it has this number of steps
_FIT_EVERY = 64
_FIRST_FITS = (8, 16, 32)  # the first fits are made after these numbers of steps
# From this number of steps on, `expect` can be used, and outliers are left out.
_WARM_UP = _FIRST_FITS[0]
_OUTLIER = 2.0  # a step is an outlier if its time differs from the expected time by this factor
# Number of steps after which a cell is known. In unknown cells, times may be far from expectations.
_KNOWN = 4
# If a cell has not had a step for _OLD steps, its earlier steps together weigh no more than _KNOWN
# steps, because the fitted line may have moved.
_OLD = 256
_PATIENCE = 16  # after this number of outliers in a row, everything is learned anew
_SPEED_RATE = 1 / 32
# A cell's ratio is mixed with the ratio of all cells with the same number of requests and the same
# draft shape. This second ratio weighs like _BORROWED steps. In the same way, the ratio of a shape
# is mixed with the ratio over all shapes, and that ratio with 1.
_BORROWED = 2.0
# Limit for the factor between a cell's times and the line. In an unknown cell, a step is an outlier
# only if its time differs from the expected time by this factor.
_FARTHEST = 8.0
_COLUMNS = 2  # number of cells between n and n + 1 draft tokens per request
# In large batches, numbers of requests that share a cell differ by no more than this factor.
_ROWS_APART = 9 / 8


class StepTimes:
    """Learns how step times, in seconds, depend on requests, draft tokens and context.

    Each draft shape has its own cells, because a tree may cost more than a chain.
    """

    def __init__(self, limits: Limits, shapes: int = 1) -> None:
        self.bin_of = _bins(limits.max_rows)
        self.bins = self.bin_of[-1] + 1
        self._shapes, self._columns = shapes, _COLUMNS * limits.k
        self.loads = 1 + shapes * self._columns
        self._forget()

    def _forget(self) -> None:
        self._seen_at = [[0] * self.loads for _ in range(self.bins)]  # last step in each cell
        # Sums over each cell's steps: steps, seconds, scored tokens, draft tokens, context tokens.
        self._cells = [
            [[0.0] * (1 + _FEATURES) for _ in range(self.loads)] for _ in range(self.bins)
        ]
        # The same sums over all cells with the same number of requests. With several draft shapes,
        # there are also such sums for each shape.
        self._of_bin = [
            [[0.0] * (1 + _FEATURES) for _ in range(1 + (self._shapes > 1) * self._shapes)]
            for _ in range(self.bins)
        ]
        self._line = [0.0] * _FEATURES
        self._gram = np.zeros((_FEATURES, _FEATURES))
        self._moment = np.zeros(_FEATURES)
        self._recent: list[tuple[float, ...]] = []  # features and seconds, not yet in `_gram`
        self._steps = 0
        self._strays = 0
        self._speed = 1.0
        self._typical_s = 0.0  # time of a step at speed 1

    @property
    def ready(self) -> bool:
        """Whether enough steps were measured, so that `expect` can be used."""
        return self._steps >= _WARM_UP

    def load_of(
        self, rows: int, draft_tokens: float, *, drafting: bool = True, shape: int = 0
    ) -> int:
        """Return a cell's column: 0 if nothing is drafted; otherwise the drafts determine it."""
        if not drafting:
            return 0
        load = math.ceil(_COLUMNS * draft_tokens / rows) or 1
        return (load if load < self._columns else self._columns) + shape * self._columns

    def weight(self, rows: int, load: int) -> float:
        """Return the number of steps in a cell's sums."""
        return self._cells[self.bin_of[rows]][load][0]

    def expect(
        self, rows: int, context: float, draft_tokens: Sequence[float], shapes: Sequence[int]
    ) -> list[float]:
        """Return the expected times in seconds of steps that differ only in their drafts.

        `context` is the number of all requests' tokens. `draft_tokens` and `shapes` have one entry
        for each step. The first entry stands for a step with a closed gate.
        """
        a, b, c, d = self._line
        bin_ = self.bin_of[rows]
        n, seconds, *_ = self._of_bin[bin_][0]
        least = (seconds / n if n else self._typical_s) / _FARTHEST
        plain = max(a + b * rows + d * context, least)
        of_bin = self._above_line(self._of_bin[bin_][0], 1.0)
        of_shapes = [self._above_line(sums, of_bin) for sums in self._of_bin[bin_][1:]]
        speed, slope = self._speed, b + c
        corrections: dict[int, float] = {}
        times: list[float] = []
        for tokens in draft_tokens:
            shape = shapes[len(times)]
            load = self.load_of(rows, tokens, shape=shape) if times else 0
            if load not in corrections:
                borrowed = of_shapes[shape] if of_shapes and load else of_bin
                corrections[load] = self._above_line(self._cells[bin_][load], borrowed)
            times.append(speed * corrections[load] * (plain + slope * tokens))
        return times

    def _above_line(self, sums: list[float], borrowed: float) -> float:
        """Return the ratio of a cell's times to the line, mixed with another ratio (`borrowed`)."""
        n, seconds, scored, drafted, read = sums
        if not n:
            return borrowed
        a, b, c, d = self._line
        line = a * n + b * scored + c * drafted + d * read
        above = _FARTHEST if line * _FARTHEST <= seconds else max(seconds / line, 1 / _FARTHEST)
        return (above * n + _BORROWED * borrowed) / (n + _BORROWED)

    def observe(
        self, rows: int, load: int, draft_tokens: int, context: int, seconds: float, expected: float
    ) -> bool:
        """Learn from a step; return False if the step is an outlier, which is left out.

        `load` is a result of `load_of`. `expected` is the step's expected time, ignored before the
        object is `ready`.
        """
        bin_ = self.bin_of[rows]
        cells = [self._cells[bin_][load], self._of_bin[bin_][0]]
        if self._steps - self._seen_at[bin_][load] > _OLD and cells[0][0] > _KNOWN:
            cells[0][:] = [value * _KNOWN / cells[0][0] for value in cells[0]]
        self._seen_at[bin_][load] = self._steps
        if load and self._shapes > 1:
            cells.append(self._of_bin[bin_][1 + (load - 1) // self._columns])
        usual = seconds / self._speed
        if self.ready:
            ratio = seconds / expected
            known = cells[0][0] >= _KNOWN
            most = _OUTLIER if known else _FARTHEST
            if not 1 / most < ratio < most:
                self._strays += 1
                if self._strays >= _PATIENCE:
                    self._forget()
                return False
            if known:
                self._speed += _SPEED_RATE * ((ratio - 1) * self._speed + 1 - self._speed)
        self._strays = 0
        self._typical_s += (usual - self._typical_s) * (_SPEED_RATE if self._steps else 1)
        scored = rows + draft_tokens
        for cell in cells:
            if cell[0] >= _CELL_MEMORY:
                for i, value in enumerate(cell):
                    cell[i] = value / 2
            cell[0] += 1
            cell[1] += usual
            cell[2] += scored
            cell[3] += draft_tokens
            cell[4] += context
        self._recent.append((1, scored, draft_tokens, context, usual))
        self._steps += 1
        if len(self._recent) == _FIT_EVERY or self._steps in _FIRST_FITS:
            self._fit()
        return True

    def _fit(self) -> None:
        """Fit the line to the recent steps and, with less weight, to earlier steps."""
        fresh = np.array(self._recent)
        relative = fresh / fresh[:, -1:]
        features = relative[:, :-1]
        keep = (1 - 1 / _MEMORY) ** len(fresh)
        gram = keep * self._gram + features.T @ features
        moment = keep * self._moment + features.sum(axis=0)
        if len(fresh) == _FIT_EVERY:
            self._gram, self._moment, self._recent = gram, moment, []
        # If the data cannot separate the effects of two features, the ridge divides the effect
        # between them. The slope of draft tokens is their cost beyond that of other scored tokens.
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-30))
        ridged = gram / np.outer(scale, scale) + np.diag(_RIDGE)
        a, b, c, d = np.linalg.solve(ridged, moment / scale) / scale
        b, d = max(b, 0.0), max(d, 0.0)
        c = max(c, -b)
        # The constant term is computed again, because a slope may have been bounded.
        a = (moment[0] - gram[0, 1] * b - gram[0, 2] * c - gram[0, 3] * d) / gram[0, 0]
        if a < 0:  # no time is negative, not even that of the smallest batch
            a = 0.0
            b = max((moment[1] - gram[1, 2] * c - gram[1, 3] * d) / gram[1, 1], 0.0)
            c = max(c, -b)  # the cost of a further token is not negative, either
        self._line = [float(a), float(b), float(c), float(d)]


def _bins(max_rows: int) -> list[int]:
    """Return the cell of each number of requests; only large numbers share a cell with others."""
    bins, bound, number = [0], 1.0, 0
    for rows in range(1, max_rows + 1):
        if rows > bound:
            number += 1
            bound = max(float(rows), bound * _ROWS_APART)
        bins.append(number)
    return bins
