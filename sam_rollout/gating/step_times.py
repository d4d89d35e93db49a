"""How long an engine step takes, learned from the steps of the engine itself.

The time of a step is `speed * base * correction`:

* `base` is linear in requests, scored tokens and context, fitted by least squares with forgetting:
  it carries what was measured over to batches that were not. Residuals count relative to the time
  of their step, or large batches would drown the long tail.
* `correction` is what a cell (number of requests, draft tokens per request) was measured to be
  above or below that line. It converges to 1 where a cell is empty.
* `speed` follows causes that slow all steps down, such as another program on the machine, so that
  drafts are not blamed for the moment at which they were tried. It is drawn back to 1 as strongly.
  Otherwise speed and base could grow apart without end; lasting changes are for base to learn.

A step that lies outside all expectation (garbage collection, a pause for weights) is left out.
After `_PATIENCE` such steps in a row the expectation must be wrong, and all begins anew.
"""

import math
from collections.abc import Sequence

import numpy as np

from sam_rollout.core.limits import Limits

_FEATURES = 4  # 1, scored tokens, draft tokens among them, context tokens
_RIDGE = (1e-6, 1e-6, 1e-3, 1e-6)
_MEMORY = 2000  # steps that the line remembers
_CELL_MEMORY = 64
_FIT_EVERY = 64
_FIRST_FITS = (8, 16, 32)  # steps after which the line is fitted at first
_WARM_UP = _FIRST_FITS[0]  # before that nothing is expected, and nothing called an outlier
_OUTLIER = 2.0
# A cell with fewer steps is not known: its steps may lie far from what is expected.
_KNOWN = 4
# Steps without one in a cell after which its earlier ones count as `_KNOWN` steps at most. The line
# may have moved since: it explains dearer trees by longer texts, say.
_OLD = 256
_PATIENCE = 16
_SPEED_RATE = 1 / 32
# Steps that a cell borrows from its number of requests (and shape), and that from the line.
_BORROWED = 2.0
_FARTHEST = 8.0  # that a cell may lie from the line
_COLUMNS = 2  # of cells, for each draft token per request
_ROWS_APART = 9 / 8  # of large batches that share cells


class StepTimes:
    """Step times by requests, draft tokens and context, in seconds.

    Args:
        limits: of the engine.
        shapes: how many shapes of drafts there are: the same tokens may cost more as a tree.
    """

    def __init__(self, limits: Limits, shapes: int = 1) -> None:
        self.bin_of = _bins(limits.max_rows)
        self.bins = self.bin_of[-1] + 1
        self._shapes, self._columns = shapes, _COLUMNS * limits.k
        self.loads = 1 + shapes * self._columns
        self._forget()

    def _forget(self) -> None:
        """Begin anew."""
        # Sums over steps of a cell: steps, seconds, scored tokens, draft tokens, context.
        self._seen_at = [[0] * self.loads for _ in range(self.bins)]  # the last step of each cell
        self._cells = [
            [[0.0] * (1 + _FEATURES) for _ in range(self.loads)] for _ in range(self.bins)
        ]
        # The same of all cells of a number of requests and, of several shapes, of each one's cells.
        self._of_bin = [
            [[0.0] * (1 + _FEATURES) for _ in range(1 + (self._shapes > 1) * self._shapes)]
            for _ in range(self.bins)
        ]
        self._line = [0.0] * _FEATURES
        self._gram = np.zeros((_FEATURES, _FEATURES))
        self._moment = np.zeros(_FEATURES)
        self._recent: list[tuple[float, ...]] = []  # features, seconds; not in gram and moment yet
        self._steps = 0
        self._strays = 0
        self._speed = 1.0
        self._typical_s = 0.0  # of a step, without speed

    @property
    def ready(self) -> bool:
        """Whether anything was measured that an expectation can be built on."""
        return self._steps >= _WARM_UP

    def load_of(
        self, rows: int, draft_tokens: float, *, drafting: bool = True, shape: int = 0
    ) -> int:
        """Column of a cell: 0 with the gate closed, else by shape and draft tokens per request."""
        if not drafting:
            return 0
        load = math.ceil(_COLUMNS * draft_tokens / rows) or 1
        return (load if load < self._columns else self._columns) + shape * self._columns

    def weight(self, rows: int, load: int) -> float:
        """Steps measured in a cell, the latest ones."""
        return self._cells[self.bin_of[rows]][load][0]

    def expect(
        self,
        rows: int,
        context: float,
        draft_tokens: Sequence[float],
        shapes: Sequence[int] | None = None,
    ) -> list[float]:
        """Expected times of steps that differ in their drafts alone, seconds.

        Args:
            rows: requests.
            context: tokens of all requests together.
            draft_tokens: of each step; the gate is closed in the first one.
            shapes: of each step's drafts; None where there is one shape.
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
            shape = shapes[len(times)] if shapes else 0
            load = self.load_of(rows, tokens, shape=shape) if times else 0
            if load not in corrections:
                borrowed = of_shapes[shape] if of_shapes and load else of_bin
                corrections[load] = self._above_line(self._cells[bin_][load], borrowed)
            times.append(speed * corrections[load] * (plain + slope * tokens))
        return times

    def _above_line(self, sums: list[float], borrowed: float) -> float:
        """How far steps lie above or below the line; few of them borrow from wider knowledge."""
        n, seconds, scored, drafted, read = sums
        if not n:
            return borrowed
        a, b, c, d = self._line
        line = a * n + b * scored + c * drafted + d * read
        return (_above(seconds, line) * n + _BORROWED * borrowed) / (n + _BORROWED)

    def observe(
        self,
        rows: int,
        load: int,
        draft_tokens: int,
        context: int,
        seconds: float,
        expected: float,
    ) -> bool:
        """Learn from a step; False if it was left out.

        Args:
            rows, load, draft_tokens, context: of the step; `load` as `load_of` tells it.
            seconds: what it took.
            expected: what `expect` said it would; ignored until `ready`.
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
        """Fit the line to the latest steps and, less and less, to those before."""
        fresh = np.array(self._recent)
        relative = fresh / fresh[:, -1:]
        features = relative[:, :-1]
        keep = (1 - 1 / _MEMORY) ** len(fresh)
        gram = keep * self._gram + features.T @ features
        moment = keep * self._moment + features.sum(axis=0)
        if len(fresh) == _FIT_EVERY:
            self._gram, self._moment, self._recent = gram, moment, []
        # Where data do not tell features apart, the ridge shares their time out. The feature of
        # draft tokens holds only the extra time of a draft token over any other scored token; it is
        # zero until it is measured.
        scale = np.sqrt(np.maximum(np.diag(gram), 1e-30))
        ridged = gram / np.outer(scale, scale) + np.diag(_RIDGE)
        a, b, c, d = np.linalg.solve(ridged, moment / scale) / scale
        b, d = max(b, 0.0), max(d, 0.0)
        c = max(c, -b)
        # With a slope refused, the level has to follow.
        a = (moment[0] - gram[0, 1] * b - gram[0, 2] * c - gram[0, 3] * d) / gram[0, 0]
        if a < 0:  # no time is negative, however small the batch
            a = 0.0
            b = max((moment[1] - gram[1, 2] * c - gram[1, 3] * d) / gram[1, 1], 0.0)
            c = max(c, -b)  # nor that of another token
        self._line = [float(a), float(b), float(c), float(d)]


def _above(seconds: float, line: float) -> float:
    """How far a cell lies above the line; bounded, should the line have gone astray."""
    if line * _FARTHEST <= seconds:
        return _FARTHEST
    return max(seconds / line, 1 / _FARTHEST)


def _bins(max_rows: int) -> list[int]:
    """Number of requests -> cell: each its own up to 8, then ever more together."""
    bins, bound, number = [0], 1.0, 0
    for rows in range(1, max_rows + 1):
        if rows > bound:
            number += 1
            bound = max(float(rows), bound * _ROWS_APART)
        bins.append(number)
    return bins
