"""Records generated texts, and keeps them until their requests end.

When an engine reports a request's end, the request's row may already belong to another request.
Therefore the text is copied in every step.
"""

import numpy as np
from numba import types

from sam_rollout.automaton.compilation import (
    GIVEN_INT32,
    GIVEN_INT32_2D,
    INT32_2D,
    given,
    kernel,
    warm_up,
)
from sam_rollout.automaton.interface import BoolArray, Int32Array

# Number of tokens at the prompt's end that are kept, as context of the first generated tokens.
CONTEXT = 8

_NOTHING = np.zeros(0, np.int32)


class TextRecorder:
    """Records at most `slots` texts of requests at a time, each of at most `max_length` tokens."""

    def __init__(self, slots: int, max_length: int) -> None:
        warm_up(record_rows)
        # Each slot has room for the longest text: untouched pages of zeroed memory cost nothing.
        self._texts = np.zeros((slots, max_length), np.int32)
        # For each slot: position of the first recorded token (-1 if unknown), length of the text
        # read so far (-1 before the first reading), and the largest number of recorded tokens so
        # far.
        self._spans = np.zeros((slots, 3), np.int32)
        self._free = list(range(slots - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """Number of bytes written so far; the system provides no memory for bytes never written."""
        return int(self._spans[:, 2].sum()) * self._texts.itemsize

    def open(self, prompt_tokens: int = 0) -> int:
        """Return a slot for another request, or -1 if none is left.

        A recorded text begins CONTEXT tokens before its first generated token. `prompt_tokens`, the
        prompt's length, says where this token is. If `prompt_tokens` is 0, the row has to end with
        its only generated token when `record` first reads it.
        """
        if not self._free:
            return -1
        slot = self._free.pop()
        self._spans[slot, 0] = max(0, prompt_tokens - CONTEXT) if prompt_tokens else -1
        self._spans[slot, 1] = -1
        return slot

    def peek(self, slot: int, start: int) -> Int32Array:
        """Return a copy of the recorded tokens from index `start` on; recording goes on."""
        first, end, _ = self._spans[slot]
        return self._texts[slot, first + start : end].copy() if end >= 0 else _NOTHING

    def take(self, slot: int) -> Int32Array:
        """Free a slot and return its text: the prompt's last few tokens, then the response."""
        start, end, _ = self._spans[slot]
        self._free.append(slot)
        return self._texts[slot, start:end].copy() if end >= 0 else _NOTHING

    def record(
        self, slots: Int32Array, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray
    ) -> None:
        """Copy each row's new tokens; `slots` is int32[B], negative for rows to skip."""
        record_rows(self._texts, self._spans, slots, token_ids, num_tokens, eligible)


@kernel(INT32_2D, INT32_2D, GIVEN_INT32, GIVEN_INT32_2D, GIVEN_INT32, given(types.boolean))
def record_rows(texts, spans, slots, token_ids, num_tokens, eligible):
    """Do the work of `TextRecorder.record`."""
    for row in range(slots.size):
        slot = slots[row]
        if slot < 0 or not eligible[row]:
            continue
        length = min(np.int64(num_tokens[row]), texts.shape[1], token_ids.shape[1])
        if spans[slot, 1] < 0:
            first = max(0, length - 1 - CONTEXT)
            if spans[slot, 0] >= 0:
                first = min(first, np.int64(spans[slot, 0]))
            spans[slot, 0] = spans[slot, 1] = first
        if length < spans[slot, 0]:  # the row now ends before the first recorded token
            spans[slot, 0] = length
        for position in range(spans[slot, 1], length):
            texts[slot, position] = token_ids[row, position]
        spans[slot, 1] = length
        spans[slot, 2] = max(spans[slot, 2], length - spans[slot, 0])
