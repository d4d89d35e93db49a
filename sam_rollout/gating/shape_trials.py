"""Decides when to try the draft shape that is not in use, and keeps the offers that trials find.

Trials (single steps) come in series. A series is over when offers (tokens that could be drafted)
are known from `LOOK_ROWS` requests, or when `_MOST_ROWS` requests took part. Each wait for the next
series is twice as long as the wait before, up to `_AT_LEAST_EVERY` steps. After a change of the
shape in use, the wait is short again.
"""

from sam_rollout.gating.draft_supply import Supply

LOOK_ROWS = 64  # offers count as known if they come from at least this number of requests
_MOST_ROWS = 2 * LOOK_ROWS
_AGAIN, _AT_LEAST_EVERY = 32, 512  # steps between two series: at first, and at most


class ShapeTrials:
    """The trials in one octave of the number of running requests (1, 2 to 3, 4 to 7, ...)."""

    def __init__(self) -> None:
        self._begun_at, self._again = 0, _AGAIN
        # How many requests that may have drafts of the tried shape took part in this series.
        self.rows = 0.0
        # The offers found in this series. They replace the shape's earlier offers once they come
        # from `LOOK_ROWS` requests. If this is None, new offers are added to the earlier offers.
        self.fresh: Supply | None = None

    def is_over(self, known: Supply) -> bool:
        """Return whether the last series is over.

        `known` holds the shape's earlier offers; it is used only if the series adds to them.
        """
        told = self.fresh or known
        return told.rows >= LOOK_ROWS or self.rows >= _MOST_ROWS

    def is_due(self, step: int) -> bool:
        """Return whether the next series may begin."""
        return step - self._begun_at >= self._again

    def begin(self, step: int, fresh: Supply | None) -> None:
        """Begin a series; its offers go to `fresh` or, if that is None, to the earlier offers."""
        self._begun_at, self.rows, self.fresh = step, 0, fresh
        self._again = min(2 * self._again, _AT_LEAST_EVERY)

    def changed(self, step: int) -> None:
        """Use the shortest wait for the next series, because the shape in use has changed."""
        self._begun_at, self._again, self.fresh = step, _AGAIN, None
