"""Learns from an engine's steps how long the next step will take (docs/gating.md).

The expected time of a step is `speed * base * correction`:

* `base` (the line) is fitted by least squares with forgetting. Residuals are relative to the step's
  time, because otherwise large batches would outweigh small ones.
* `correction` is the ratio of measured times to `base` in a cell. A cell has the steps with about
  the same number of requests and of draft tokens per request. An empty cell takes its correction
  from the cells with the same number of requests. If these are empty, too, the correction is 1.
* `speed` follows causes that slow all steps down, such as another program on the machine. It is
  also pulled back to 1, because otherwise `speed` and `base` could drift in opposite directions.
"""

import math
from collections.abc import Sequence

import numpy as np

from sam_rollout.core.limits import Limits

_FEATURES = 4  # of a step: the constant 1, scored tokens, draft tokens among them, context tokens
_RIDGE = (1e-6, 1e-6, 1e-3, 1e-6)
_MEMORY = 2000  # steps that the line remembers
_CELL_MEMORY = 64  # steps that a cell remembers
_FIT_EVERY = 64
_FIRST_FITS = (8, 16, 32)  # numbers of steps after which the first fits are made
_WARM_UP = _FIRST_FITS[0]  # before this number of steps, there are no expectations and no outliers
_OUTLIER = 2.0  # a step is an outlier if its time differs from the expected time by this factor
_KNOWN = 4  # steps after which a cell is known; an unknown cell may lie far from the expectation
# If a cell had no step for this many steps, its old measurements together weigh no more than
# `_KNOWN` steps, because the fitted line may have moved.
_OLD = 256
_PATIENCE = 16
_SPEED_RATE = 1 / 32
# A cell's ratio is mixed with a wider ratio, which counts like this number of steps: the ratio of
# all cells with the same number of requests and the same shape. The wider ratio is mixed in the
# same way with the ratio over all shapes, which is mixed with 1.
_BORROWED = 2.0
_FARTHEST = 8.0  # largest factor by which a cell may differ from the line
_COLUMNS = 2  # cells for each draft token per request
_ROWS_APART = 9 / 8  # largest ratio of the numbers of requests that share a cell, in large batches


class StepTimes:
    """Learns how step times, in seconds, depend on requests, draft tokens and context.

    Each shape of drafts has its own cells, because a tree may cost more than a chain.
    """

    def __init__(self, limits: Limits, shapes: int = 1) -> None:
        self.bin_of = _bins(limits.max_rows)
        self.bins = self.bin_of[-1] + 1
        self._shapes, self._columns = shapes, _COLUMNS * limits.k
        self.loads = 1 + shapes * self._columns
        self._forget()

    def _forget(self) -> None:
        self._seen_at = [[0] * self.loads for _ in range(self.bins)]  # the last step of each cell
        # Sums over the steps of each cell: steps, seconds, scored tokens, draft tokens, context.
        self._cells = [
            [[0.0] * (1 + _FEATURES) for _ in range(self.loads)] for _ in range(self.bins)
        ]
        # The same sums over all cells with the same number of requests; with several shapes, also
        # over those of each shape.
        self._of_bin = [
            [[0.0] * (1 + _FEATURES) for _ in range(1 + (self._shapes > 1) * self._shapes)]
            for _ in range(self.bins)
        ]
        self._line = [0.0] * _FEATURES
        self._gram = np.zeros((_FEATURES, _FEATURES))
        self._moment = np.zeros(_FEATURES)
        self._recent: list[tuple[float, ...]] = []  # features and seconds not in `_gram` yet
        self._steps = 0
        self._strays = 0
        self._speed = 1.0
        self._typical_s = 0.0  # time of a step at speed 1

    @property
    def ready(self) -> bool:
        """Whether enough was measured for an expectation."""
        return self._steps >= _WARM_UP

    def load_of(
        self, rows: int, draft_tokens: float, *, drafting: bool = True, shape: int = 0
    ) -> int:
        """Return a cell's column: 0 with the gate closed, else by shape and draft tokens."""
        if not drafting:
            return 0
        load = math.ceil(_COLUMNS * draft_tokens / rows) or 1
        return (load if load < self._columns else self._columns) + shape * self._columns

    def weight(self, rows: int, load: int) -> float:
        """Return the number of latest steps that a cell remembers."""
        return self._cells[self.bin_of[rows]][load][0]

    def expect(
        self, rows: int, context: float, draft_tokens: Sequence[float], shapes: Sequence[int]
    ) -> list[float]:
        """Return the expected times in seconds of steps that differ only in their drafts.

        `context` is the number of all requests' tokens. `draft_tokens` and `shapes` describe each
        step's drafts; in the first step the gate is closed.
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
        """Return the ratio of a cell's times to the line, mixed with the ratio `borrowed`."""
        n, seconds, scored, drafted, read = sums
        if not n:
            return borrowed
        a, b, c, d = self._line
        line = a * n + b * scored + c * drafted + d * read
        # The ratio is bounded, because the line may be far off.
        above = _FARTHEST if line * _FARTHEST <= seconds else max(seconds / line, 1 / _FARTHEST)
        return (above * n + _BORROWED * borrowed) / (n + _BORROWED)

    def observe(
        self, rows: int, load: int, draft_tokens: int, context: int, seconds: float, expected: float
    ) -> bool:
        """Learn from a step; return False if it was left out.

        `load` is a result of `load_of`. `expected` is the step's expected time, ignored until
        `ready`.
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
        """Fit the line to the latest steps and, with falling weight, to earlier steps."""
        fresh = np.array(self._recent)
        relative = fresh / fresh[:, -1:]
        features = relative[:, :-1]
        keep = (1 - 1 / _MEMORY) ** len(fresh)
        gram = keep * self._gram + features.T @ features
        moment = keep * self._moment + features.sum(axis=0)
        if len(fresh) == _FIT_EVERY:
            self._gram, self._moment, self._recent = gram, moment, []
        # The ridge divides the time between features whose effects the data do not separate. The
        # slope of draft tokens is what they cost beyond the cost of any scored token.
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-30))
        ridged = gram / np.outer(scale, scale) + np.diag(_RIDGE)
        a, b, c, d = np.linalg.solve(ridged, moment / scale) / scale
        b, d = max(b, 0.0), max(d, 0.0)
        c = max(c, -b)
        # If a slope was bounded, the constant term has to be computed again.
        a = (moment[0] - gram[0, 1] * b - gram[0, 2] * c - gram[0, 3] * d) / gram[0, 0]
        if a < 0:  # no time is negative, however small the batch
            a = 0.0
            b = max((moment[1] - gram[1, 2] * c - gram[1, 3] * d) / gram[1, 1], 0.0)
            c = max(c, -b)  # the time of a further token is not negative either
        self._line = [float(a), float(b), float(c), float(d)]


def _bins(max_rows: int) -> list[int]:
    """Map numbers of requests to cells; each small number has its own cell, larger ones share."""
    bins, bound, number = [0], 1.0, 0
    for rows in range(1, max_rows + 1):
        if rows > bound:
            number += 1
            bound = max(float(rows), bound * _ROWS_APART)
        bins.append(number)
    return bins
