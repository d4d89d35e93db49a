"""The base class of the sources that keep the texts of live requests in automata."""

import zlib

import numpy as np

from sam_rollout.automaton.interface import BoolArray, Int32Array, Int64Array
from sam_rollout.core.identity import GroupKey
from sam_rollout.sources.contract import Limits, Source, Usage

NO_SLOT = -1
LIVE_BYTES_PER_TOKEN = 60  # an estimate for automata that are not made yet


def number_of(key: GroupKey) -> int:
    """Return a hash of a group's key, a number below 2**31; collisions are very rare."""
    return zlib.crc32("{}/{}/{}".format(*key).encode()) >> 1


class LiveTexts(Source):
    """Keeps a pool of automata, and the slot of each row of the batch in this pool."""

    def __init__(self, limits: Limits) -> None:
        from sam_rollout.automaton.pool import AutomatonPool  # this import is slow

        self.pool = AutomatonPool()
        self.evictions = 0  # automata given up so far
        max_rows = limits.max_rows
        self._slots = np.full(max_rows, NO_SLOT, np.int32)  # [max_rows], slots of bound requests
        self._active = self._slots  # [B], slots in the last call; NO_SLOT for rows not eligible
        self._rows = np.arange(max_rows, dtype=np.int32)  # [max_rows]

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray) -> None:
        """Let automata read the rows' new tokens; raise the errors of `AutomatonPool.extend`."""
        batch = len(num_tokens)
        self._active = np.where(eligible, self._slots[:batch], NO_SLOT)
        self.pool.extend(self._active, self._rows[:batch], token_ids, num_tokens)

    def locate(
        self, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray, places: Int64Array
    ) -> None:
        """Read the rows' new tokens; write the places from which the rows may draft."""
        self.catch_up(token_ids, num_tokens, eligible)
        self.pool.place_rows(self._active, places)

    def usage(self) -> Usage:
        """Report the pool's figures."""
        return Usage(
            self.pool.appended_tokens, self.pool.rebuilds, self.evictions, len(self.pool),
            self.pool.nbytes,
        )  # fmt: skip
