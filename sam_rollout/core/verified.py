"""The results of verifying the last drafts, computed once per engine step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Verified(NamedTuple):
    """The results of one engine step's verification, with one number per request in each field.

    The fields are int32[B] in row order. They are buffers that the next step overwrites.
    """

    sampled: Int32Array  # Tokens gained, bonus token included; 0 for a prompt still being computed.
    drafted: Int32Array  # Draft tokens that were verified.
    accepted: Int32Array  # Draft tokens that were accepted.
    filling: Int32Array  # Padding tokens, verified only to keep the step's shape.
    source: Int32Array  # Number of the source whose votes for a draft weigh most; -1 without votes.
    # The next two also count draft tokens that were not verified, as the text may judge them, too.
    judged: Int32Array  # Draft tokens known to be right or wrong.
    right: Int32Array  # Length of the draft's longest prefix with which the text continues.

    def copy(self) -> Verified:
        """Return the same numbers in new arrays."""
        return Verified(*(column.copy() for column in self))


# Draft tokens are counted in groups by their probability of acceptance, with these lower bounds.
CHANCES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35, 0.28, 0.22, 0.17, 0.13, 0.1, 0.07, 0.05, 0.03, 0.0)


class Offered(NamedTuple):
    """Counts of the draft tokens found for a step; the next step overwrites `tokens`."""

    rows: int  # Requests that were allowed drafts and gained tokens in the step.
    # float64[4, len(CHANCES)], for each group of `CHANCES`: the draft tokens found, those known to
    # be right or wrong (judged), the right ones, and the sum of the judged tokens' probabilities.
    tokens: npt.NDArray[np.float64]

    def copy(self) -> Offered:
        """Return the same numbers in a new array."""
        return Offered(self.rows, self.tokens.copy())
