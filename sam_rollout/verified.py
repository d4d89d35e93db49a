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
    source: Int32Array  # number of the source that drafted, -1 where none did

    def copy(self) -> Verified:
        """The same numbers in arrays of their own."""
        return Verified(*(column.copy() for column in self))
