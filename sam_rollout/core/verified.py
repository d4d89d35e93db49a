"""The results of verifying the last drafts, computed once per engine step."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Verified(NamedTuple):
    """One engine step's verification, int32[B] each, in the present order of rows.

    The arrays are reused buffers, valid until the next step; `copy` keeps them.
    """

    sampled: Int32Array  # Tokens gained, bonus token included; 0 for a prompt still being computed.
    drafted: Int32Array  # Draft tokens that were verified.
    accepted: Int32Array  # Draft tokens that were accepted.
    filling: Int32Array  # Padding tokens, verified only to keep the step's shape.
    source: Int32Array  # Number of the source that voted most for the draft, -1 for none.
    # The sampled text also shows whether draft tokens that were not verified are right.
    judged: Int32Array  # Draft tokens known to be right or wrong.
    right: Int32Array  # Length of the draft's longest prefix that the text continues with.

    def copy(self) -> Verified:
        """Return the same numbers in new arrays."""
        return Verified(*(column.copy() for column in self))


# Draft tokens are counted by class of their probability of acceptance; the classes' lower bounds:
CHANCES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35, 0.28, 0.22, 0.17, 0.13, 0.1, 0.07, 0.05, 0.03, 0.0)


class Offered(NamedTuple):
    """The drafts that were found in a step, verified or not, and their results.

    `tokens` is a reused buffer, valid until the next step; `copy` keeps it.
    """

    rows: int  # Requests that were allowed drafts and gained tokens in the step.
    # float64[4, CHANCES], by class: the numbers of draft tokens offered, judged and right, and the
    # sum of the probabilities of the judged ones.
    tokens: npt.NDArray[np.float64]

    def copy(self) -> Offered:
        """Return the same numbers in a new array."""
        return Offered(self.rows, self.tokens.copy())
