"""What the sources over live texts have in common: own text and siblings."""

import numpy as np

from sam_rollout.automaton.pool import AutomatonPool, Int32Array

NO_SLOT = -1


class LiveTexts:
    """A pool, and which of its slots belongs to which row of the batch.

    Args:
        max_rows: most requests in one batch.
        max_branches: up to how many the continuations of a match are counted.
    """

    def __init__(self, max_rows: int, max_branches: int) -> None:
        self.pool = AutomatonPool()
        self.evictions = 0
        self._max_branches = max_branches
        self._slots = np.full(max_rows, NO_SLOT, np.int32)  # [max_rows], of the bound requests
        self._active = np.empty(max_rows, np.int32)  # [max_rows], NO_SLOT where not eligible
        self._rows = np.arange(max_rows, dtype=np.int32)  # [max_rows]

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Catch the bound rows up; arguments and errors as for `SamDrafter.step`."""
        batch = len(num_tokens)
        active = self._active[:batch]
        active.fill(NO_SLOT)
        np.copyto(active, self._slots[:batch], where=eligible)
        self.pool.extend(active, self._rows[:batch], token_ids, num_tokens)

    def match(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_matches: Int32Array,
    ) -> None:
        """Catch up, then find each row's match: int32[B, MATCH_WIDTH]."""
        self.catch_up(token_ids, num_tokens, eligible)
        self.pool.match_rows(self._active[: len(num_tokens)], out_matches, self._max_branches)

    def draft(
        self, matches: Int32Array, k: Int32Array, out_tokens: Int32Array, out_counts: Int32Array
    ) -> None:
        """Draft from the matches found last; rows with k < 1 are left alone."""
        self.pool.draft_rows(self._active[: len(k)], matches, k, out_tokens, out_counts)
