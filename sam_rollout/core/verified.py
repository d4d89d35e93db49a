"""What became of the last drafts: worked out once per engine step, read by all who count."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Verified(NamedTuple):
    """One engine step's verification, int32[B] each, in today's order of rows.

    The arrays are buffers of whoever made them and hold until the next step; `copy` keeps them.
    """

    sampled: Int32Array  # tokens gained, bonus token included; 0 for a prompt still being computed
    drafted: Int32Array  # draft tokens that were verified
    accepted: Int32Array  # of these, the ones kept
    filling: Int32Array  # tokens verified only to keep the step's shape
    source: Int32Array  # number of the source that voted most for a draft, -1 for none
    # Of a draft, the tokens held back included, those that the text told to be right or wrong, and
    # the right ones: its longest prefix that the text goes on with.
    judged: Int32Array
    right: Int32Array

    def copy(self) -> Verified:
        """The same numbers in arrays of their own."""
        return Verified(*(column.copy() for column in self))


# Draft tokens are summed up by their chance to be accepted: least chance of each class.
CHANCES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.42, 0.35, 0.28, 0.22, 0.17, 0.13, 0.1, 0.07, 0.05, 0.03, 0.0)


class Offered(NamedTuple):
    """What could be drafted in a step, whether it was handed over or not, and what came of it.

    `tokens` is a buffer of whoever made it and holds until the next step; `copy` keeps it.
    """

    rows: int  # requests that were allowed drafts and were verified
    # float64[4, CHANCES]: draft tokens offered; of those that were judged: all, the right ones, and
    # as many as were expected to be right.
    tokens: npt.NDArray[np.float64]

    def copy(self) -> Offered:
        """The same numbers in an array of their own."""
        return Offered(self.rows, self.tokens.copy())
