"""The source `own`: each request drafts from its own prompt and response.

Automata know slots, engines know request ids that come and go and change rows. This module keeps
the two together, and decides whose automaton is given up when there are too many or too large.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from sam_rollout.automaton.pool import AutomatonPool, Int32Array

_NO_SLOT = -1


class OwnText:
    """One automaton per request, kept while the request lives and memory lasts.

    A request that is absent from the batch (preempted) keeps its automaton and catches up when it
    returns, unless it was the longest absent of more than `2 * max_rows + 16` live ones.

    Args:
        max_rows: most requests in one batch.
        max_model_len: longest text in tokens.
        max_bytes: memory of all automata. It is checked after every step, so one step's growth
            may exceed it for a moment. Absent requests give way first, longest absent first, then
            the smallest present ones: long texts yield the longest drafts and make up the tail.
    """

    def __init__(self, max_rows: int, max_model_len: int, max_bytes: int) -> None:
        self.pool = AutomatonPool(max_length=max_model_len)
        self.evictions = 0
        self._max_live = 2 * max_rows + 16
        self._max_bytes = max_bytes
        self._slot_of: dict[str, int] = {}  # longest absent first
        # Present requests whose automaton was given up, and the bytes it had.
        self._suspended: dict[str, int] = {}
        self._bound_ids: list[str] | None = None
        self._slots = np.full(max_rows, _NO_SLOT, np.int32)  # [max_rows], of the bound ids
        self._active = np.empty(max_rows, np.int32)  # [max_rows], _NO_SLOT where not eligible
        self._rows = np.arange(max_rows, dtype=np.int32)  # [max_rows]

    def bind(self, request_ids: Sequence[str]) -> None:
        """Tell which request is in which row; costs one comparison while the batch is unchanged.

        Raises:
            ValueError: an id occurs twice.
        """
        if request_ids == self._bound_ids:
            return
        ids = list(request_ids)
        if len(set(ids)) != len(ids):
            raise ValueError("a request id occurs twice in the batch")
        self._resume(ids)
        for row, request_id in enumerate(ids):
            if request_id in self._suspended:
                self._slots[row] = _NO_SLOT
                continue
            slot = self._slot_of.pop(request_id, _NO_SLOT)
            slot = self.pool.open() if slot == _NO_SLOT else slot
            self._slot_of[request_id] = slot  # last in order: present
            self._slots[row] = slot
        self._bound_ids = ids
        while len(self._slot_of) > self._max_live:
            self._evict(next(iter(self._slot_of)))

    def read(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Catch the bound rows up; arguments as for `SamDrafter.step`."""
        batch = len(num_tokens)
        self.pool.extend(self._select(eligible), self._rows[:batch], token_ids, num_tokens)
        self._respect_max_bytes()

    def read_and_draft(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        k: Int32Array,
        out_tokens: Int32Array,
        out_counts: Int32Array,
    ) -> None:
        """Catch the bound rows up and draft; `k`, `out_*` as for the pool's method."""
        batch = len(num_tokens)
        self.pool.extend_and_draft(
            self._select(eligible), self._rows[:batch], token_ids, num_tokens,
            k, out_tokens, out_counts,
        )  # fmt: skip
        self._respect_max_bytes()

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended; unknown ids are passed over."""
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, _NO_SLOT)
            if slot != _NO_SLOT:
                self.pool.close(slot)
            elif self._suspended.pop(request_id, None) is None:
                continue
            # The next batch may contain this id again, as a new request.
            self._bound_ids = None

    def _select(self, eligible: np.ndarray) -> Int32Array:
        """Slots of the bound rows, those of rows to be left alone masked out. int32[B]."""
        active = self._active[: len(eligible)]
        active.fill(_NO_SLOT)
        np.copyto(active, self._slots[: len(eligible)], where=eligible)
        return active

    def _resume(self, ids: list[str]) -> None:
        """Take suspended requests back, in row order, while what they had fits again."""
        if not self._suspended:
            return
        nbytes = self.pool.nbytes
        suspended = {}
        for request_id in ids:
            had = self._suspended.get(request_id)
            if had is None:
                continue
            if nbytes + had <= self._max_bytes:
                nbytes += had
            else:
                suspended[request_id] = had
        self._suspended = suspended

    def _respect_max_bytes(self) -> None:
        """Give automata up until the rest fits, in the order the class describes."""
        if self.pool.nbytes <= self._max_bytes:
            return
        row_of = {request_id: row for row, request_id in enumerate(self._bound_ids or ())}
        absent = [request_id for request_id in self._slot_of if request_id not in row_of]
        by_size = sorted(
            (self.pool.nbytes_of(slot), request_id)
            for request_id, slot in self._slot_of.items()
            if request_id in row_of
        )
        for request_id in absent + [request_id for _, request_id in by_size]:
            nbytes = self._evict(request_id)
            if request_id in row_of:
                # Until the batch changes: taking it back sooner would only push out another.
                self._suspended[request_id] = nbytes
                self._slots[row_of[request_id]] = _NO_SLOT
            if self.pool.nbytes <= self._max_bytes:
                return

    def _evict(self, request_id: str) -> int:
        """Give an automaton up; return the bytes it had."""
        slot = self._slot_of.pop(request_id)
        nbytes = self.pool.nbytes_of(slot)
        self.pool.close(slot)
        self.evictions += 1
        return nbytes
