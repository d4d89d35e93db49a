"""The memory of many automata: who owns the buffers, when they grow, what is refused.

Every automaton has two int32 arrays of its own (states and edges, see `kernels.py`), so that one
that grows copies nothing of the others and one that ends gives its memory back at once.
"""

from collections.abc import Callable
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from sam_rollout.automaton import kernels

Int32Array = npt.NDArray[np.int32]

# Buffers grow by half: doubling saves few copies and leaves a quarter more memory unused.
_GROWTH_NUMERATOR, _GROWTH_DENOMINATOR = 3, 2

# First sizes relative to the tokens to be read, from reasoning text: 0.4-0.6 clones and 0.7-1.1
# branching edges per token, the edge table at most four fifths full.
_CLONES_PER_TOKEN = 0.4
_EDGE_SLOTS_PER_TOKEN = 1.2

# Suffix links along which an end position is noted per token: costs 31 ns on the worst text
# instead of microseconds, and loses under 0.5 % of the accepted tokens.
MAX_LINK_UPDATES = 8

_CAPACITY_OF_REASON = {
    kernels.NEED_TOKENS: kernels.TOKEN_CAPACITY,
    kernels.NEED_CLONES: kernels.CLONE_CAPACITY,
    kernels.NEED_EDGES: kernels.EDGE_CAPACITY,
}


class AutomatonPool:
    """Suffix automata of many texts, one per open slot (SAM-Decoding, arXiv 2411.10666).

    Not thread-safe, though the kernels release the GIL: one pool belongs to one engine worker.

    Args:
        initial_capacity: tokens an automaton has room for when it reads its first one.
        max_length: no text gets longer than this (the engine's max_model_len); keeps the last
            growth of a long text from overshooting. None for no bound.
        max_link_updates: suffix links along which an end position is noted per token. A larger
            number finds later occurrences in very repetitive text, at that many memory accesses.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        initial_capacity: int = 1024,
        max_length: int | None = None,
        max_link_updates: int = MAX_LINK_UPDATES,
    ) -> None:
        for name, value in (
            ("initial_capacity", initial_capacity),
            ("max_link_updates", max_link_updates),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        kernels.warm_up()
        self._initial_capacity = initial_capacity
        self._max_length = max_length
        self._max_link_updates = max_link_updates
        self._table = np.zeros((16, kernels.HEADER_WIDTH), np.int64)  # [slots, HEADER_WIDTH]
        self._buffers: list[tuple[Int32Array, Int32Array] | None] = [None] * len(self._table)
        self._free = list(range(len(self._table) - 1, -1, -1))
        self._progress = np.zeros(kernels.PROGRESS_WIDTH, np.int64)
        self._nbytes = 0

    def __len__(self) -> int:
        """Number of open slots."""
        return len(self._buffers) - len(self._free)

    @property
    def nbytes(self) -> int:
        """Bytes held by the buffers of all automata, texts included."""
        return self._nbytes

    @property
    def appended_tokens(self) -> int:
        """Tokens read so far by all automata, those of rebuilt texts counted again."""
        return int(self._progress[kernels.APPENDED])

    @property
    def rebuilds(self) -> int:
        """How often a row was no continuation of its automaton's text."""
        return int(self._progress[kernels.REBUILDS])

    def open(self) -> int:
        """Start an empty text and return its slot. Memory is taken when it reads a token."""
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self._table[slot] = 0
        self._table[slot, kernels.OPEN] = 1
        return slot

    def close(self, slot: int) -> None:
        """Forget a text and free its memory. The slot will be given out again.

        Raises:
            IndexError: the slot is not open.
        """
        self._require_open(slot)
        self._nbytes -= self.nbytes_of(slot)
        self._buffers[slot] = None
        self._table[slot] = 0
        self._free.append(slot)

    def length(self, slot: int) -> int:
        """Tokens read by the automaton in `slot`."""
        self._require_open(slot)
        return int(self._table[slot, kernels.LENGTH])

    def match(self, slot: int) -> tuple[int, int]:
        """(length, end) of the longest suffix of the text that also occurs earlier in it.

        `end` is the number of tokens up to the end of that earlier occurrence: the latest one,
        unless the text is so repetitive that `max_link_updates` kept it from being noted.
        (0, 0) when no token has repeated.
        """
        self._require_open(slot)
        header = self._table[slot]
        return int(header[kernels.MATCH_LENGTH]), int(header[kernels.MATCH_END])

    def nbytes_of(self, slot: int) -> int:
        """Bytes held by one automaton."""
        buffers = self._buffers[slot]
        return 0 if buffers is None else buffers[0].nbytes + buffers[1].nbytes

    def extend(
        self, slots: Int32Array, rows: Int32Array, token_ids: Int32Array, lengths: Int32Array
    ) -> None:
        """Read each row's text up to its length, from where its automaton stands.

        The result does not depend on how a text is cut into calls. A row that is shorter than
        what was read, or differs from it in the last few tokens, is read again from its start.

        Args:
            slots: int32[B], open slots; a negative one skips the row.
            rows: int32[B], the row of `token_ids` that belongs to each slot.
            token_ids: int32[R, L], token ids >= 0; read in place, never copied as a whole.
            lengths: int32[B], known tokens of each row.

        Raises:
            TypeError: an array is not int32 (ids of 2**31 and more do not fit a token).
            IndexError: a slot is not open, or a row or length lies outside `token_ids`.
            ValueError: arrays differ in length, or a token id is negative. Rows before the
                offending one have been read.
        """
        self._check(token_ids, slots=slots, rows=rows, lengths=lengths)
        self._run(kernels.extend_rows, slots, rows, token_ids, lengths)

    def extend_and_draft(
        self,
        slots: Int32Array,
        rows: Int32Array,
        token_ids: Int32Array,
        lengths: Int32Array,
        k: Int32Array,
        out_tokens: Int32Array,
        out_counts: Int32Array,
    ) -> None:
        """`extend`, then draft for each row what followed the latest earlier match.

        Args:
            slots, rows, token_ids, lengths: as for `extend`.
            k: int32[B], most tokens to draft for each row; capped by the width of `out_tokens`.
            out_tokens: int32[B, K], written where drafted; the rest keeps what it held.
            out_counts: int32[B], tokens drafted: min(k, K) where any suffix of the text has
                occurred before, else 0; 0 for skipped rows.

        Raises:
            as `extend`.
        """
        self._check(token_ids, slots=slots, rows=rows, lengths=lengths, k=k,
                    out_tokens=out_tokens, out_counts=out_counts)  # fmt: skip
        self._run(
            kernels.extend_and_draft_rows,
            slots, rows, token_ids, lengths, k, out_tokens, out_counts,
        )  # fmt: skip

    def _check(self, token_ids: Int32Array, **arrays: Int32Array) -> None:
        """Refuse types the kernels were not compiled for, and arrays of unequal length."""
        if token_ids.dtype != np.int32 or token_ids.ndim != 2:
            raise TypeError(
                f"token_ids must be int32[R, L], got {token_ids.dtype}{list(token_ids.shape)}"
            )
        for name, array in arrays.items():
            if array.dtype != np.int32:
                raise TypeError(f"{name} must be int32, got {array.dtype}")
            if len(array) != len(arrays["slots"]):
                raise ValueError(f"{name} has {len(array)} rows, slots has {len(arrays['slots'])}")

    def _run(
        self,
        kernel: Callable[..., int],
        slots: Int32Array,
        rows: Int32Array,
        token_ids: Int32Array,
        lengths: Int32Array,
        *draft: Int32Array,
    ) -> None:
        """Call a kernel, growing the automaton it stops at, until it has done every row."""
        row = 0
        while True:
            row = kernel(
                self._table, slots, rows, token_ids, lengths, self._max_link_updates, row,
                self._progress, *draft,
            )  # fmt: skip
            if row == len(slots):
                return
            reason = int(self._progress[kernels.REASON])
            if reason not in _CAPACITY_OF_REASON:
                self._refuse(reason, row, slots, rows, token_ids, lengths)
            self._grow(int(slots[row]), reason, int(lengths[row]))

    def _refuse(
        self,
        reason: int,
        i: int,
        slots: Int32Array,
        rows: Int32Array,
        token_ids: Int32Array,
        lengths: Int32Array,
    ) -> NoReturn:
        """Raise for what a kernel found wrong with row i."""
        if reason == kernels.BAD_SLOT:
            raise IndexError(f"slots[{i}] = {slots[i]} is not an open slot")
        if reason == kernels.BAD_ROW:
            raise IndexError(
                f"rows[{i}] = {rows[i]} with lengths[{i}] = {lengths[i]} lies outside "
                f"token_ids{list(token_ids.shape)}"
            )
        position = self.length(int(slots[i]))
        raise ValueError(
            f"token_ids[{rows[i]}, {position}] = {token_ids[rows[i], position]}, "
            f"token ids must lie in [0, 2**31)"
        )

    def _grow(self, slot: int, reason: int, length: int) -> None:
        """Enlarge what a kernel ran out of while reading a text of `length` tokens."""
        header = self._table[slot]
        if header[kernels.TOKEN_CAPACITY] == 0:
            tokens = self._token_capacity(length, self._initial_capacity)
            self._resize_states(slot, tokens, int(tokens * _CLONES_PER_TOKEN) + 1)
            self._resize_edges(slot, int(tokens * _EDGE_SLOTS_PER_TOKEN) + 2)
            return
        grown = int(header[_CAPACITY_OF_REASON[reason]])
        grown = grown * _GROWTH_NUMERATOR // _GROWTH_DENOMINATOR + 1
        if reason == kernels.NEED_EDGES:
            self._resize_edges(slot, grown)
        elif reason == kernels.NEED_CLONES:
            self._resize_states(slot, int(header[kernels.TOKEN_CAPACITY]), grown)
        else:
            tokens = self._token_capacity(length, grown)
            self._resize_states(slot, tokens, int(header[kernels.CLONE_CAPACITY]))

    def _token_capacity(self, needed: int, wanted: int) -> int:
        if self._max_length is not None:
            wanted = min(wanted, self._max_length)
        return max(needed, wanted)

    def _resize_states(self, slot: int, tokens: int, clones: int) -> None:
        """Give an automaton room for `tokens` and `clones`, no fewer than it has."""
        header = self._table[slot]
        old, edges = self._buffers[slot] or (_EMPTY, _EMPTY)
        states = np.zeros((clones + tokens + 1, kernels.WIDTH), np.int32)
        shift = clones - int(header[kernels.CLONE_CAPACITY])
        states[shift : shift + len(old)] = old
        header[kernels.TOKEN_CAPACITY] = tokens
        header[kernels.CLONE_CAPACITY] = clones
        header[kernels.STATES] = states.ctypes.data + clones * states.strides[0]
        self._keep(slot, states, edges)

    def _resize_edges(self, slot: int, capacity: int) -> None:
        states, _ = self._buffers[slot] or (_EMPTY, _EMPTY)
        edges = np.zeros((capacity, kernels.WIDTH), np.int32)
        kernels.move_edges(self._table[slot], edges.ctypes.data, capacity)
        self._keep(slot, states, edges)

    def _keep(self, slot: int, states: Int32Array, edges: Int32Array) -> None:
        """Own the buffers whose addresses the header holds, and account for them."""
        self._nbytes -= self.nbytes_of(slot)
        self._buffers[slot] = (states, edges)
        self._nbytes += self.nbytes_of(slot)

    def _add_slots(self) -> None:
        count = len(self._table)
        self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._buffers.extend([None] * count)
        self._free.extend(range(2 * count - 1, count - 1, -1))

    def _require_open(self, slot: int) -> None:
        if not 0 <= slot < len(self._table) or not self._table[slot, kernels.OPEN]:
            raise IndexError(f"slot {slot} is not open")


_EMPTY = np.zeros((0, kernels.WIDTH), np.int32)
