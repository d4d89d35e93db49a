"""Decides when to try the draft shape that is not in use, and keeps the offers that trials found.

A series of trials is over when enough requests had offers (tokens that could be drafted), or when
twice as many requests took part. Each wait before a series is twice as long as the previous wait,
until a series changes the shape in use.
"""

from sam_rollout.gating.draft_supply import Supply

LOOK_ROWS = 64  # offers count as known once they come from this number of requests
_MOST_ROWS = 2 * LOOK_ROWS  # largest number of requests in the trials of a series
_AGAIN, _AT_LEAST_EVERY = 32, 512  # steps from one series to the next: at first, and at most


class ShapeTrials:
    """The trials of one octave of the number of running requests."""

    def __init__(self) -> None:
        self._begun_at, self._again = 0, _AGAIN
        # Number of requests that may have drafts of the tried shape, summed over this series.
        self._rows = 0.0
        # New offers, which replace the shape's known offers once they come from `LOOK_ROWS`
        # requests. The first series adds to the known offers instead.
        self.fresh: Supply | None = None

    def is_over(self, known: Supply) -> bool:
        """Whether no series is under way; `known` are the shape's offers without `fresh`."""
        told = self.fresh or known
        return told.rows >= LOOK_ROWS or self._rows >= _MOST_ROWS

    def is_due(self, step: int) -> bool:
        """Whether the next series may begin."""
        return step - self._begun_at >= self._again

    def begin(self, step: int, fresh: Supply | None) -> None:
        """Begin a series, which adds to `fresh`; None stands for the shape's known offers."""
        self._begun_at, self._rows, self.fresh = step, 0, fresh
        self._again = min(2 * self._again, _AT_LEAST_EVERY)

    def count(self, rows: float) -> None:
        """Add a trial, in which `rows` requests may have drafts of the shape on trial."""
        self._rows += rows

    def changed(self, step: int) -> None:
        """Start the shortest wait for a series, because the shape in use has changed."""
        self._begun_at, self._again, self.fresh = step, _AGAIN, None
