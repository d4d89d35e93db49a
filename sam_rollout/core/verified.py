"""The results of verifying the last drafts, computed once per engine step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Verified(NamedTuple):
    """The results of one engine step's verification.

    Each field is int32[B], with a number for each row. The next step overwrites these arrays.
    """

    sampled: Int32Array  # Tokens gained, bonus token included; 0 while the prompt is computed.
    drafted: Int32Array  # Draft tokens that were verified.
    accepted: Int32Array  # Draft tokens that were accepted.
    filling: Int32Array  # Padding tokens, verified only to keep the step's shape.
    # Number of the source whose votes for the draft's first token weigh most; -1 without votes.
    source: Int32Array
    # `judged` and `right` also count tokens that were chosen for a draft but not verified, because
    # the text may still show whether these tokens are right.
    judged: Int32Array  # Chosen tokens known to be right or wrong.
    right: Int32Array  # Number of chosen tokens with which the text continues.

    def copy(self) -> Verified:
        """Return the same numbers in new arrays."""
        return Verified(*(column.copy() for column in self))


# Draft tokens are counted in groups, by their probability of acceptance. These are the groups'
# lower bounds.
CHANCES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35, 0.28, 0.22, 0.17, 0.13, 0.1, 0.07, 0.05, 0.03, 0.0)


class Offered(NamedTuple):
    """Counts of the draft tokens found for a step; the next step overwrites `tokens`."""

    rows: int  # Requests that were allowed drafts and gained tokens in the step.
    # float64[4, len(CHANCES)], a column for each group of `CHANCES`. The rows are: tokens found,
    # tokens judged (known to be right or wrong), right tokens, sum of the judged tokens' chances.
    tokens: npt.NDArray[np.float64]

    def copy(self) -> Offered:
        """Return the same numbers in a new array."""
        return Offered(self.rows, self.tokens.copy())
