"""Keeps what requests generate until they end; their rows in the engine are reused before that.

An engine passes the same growing rows step by step. It reports the end of a request only after
the row belongs to another one. Four bytes per token are cheaper than asking the engine.
"""

import numpy as np
import numpy.typing as npt
from numba import types

from sam_rollout.automaton.compilation import (
    GIVEN_INT32,
    GIVEN_INT32_2D,
    INT32_2D,
    given,
    kernel,
    warm_up,
)
from sam_rollout.automaton.interface import Int32Array

# Tokens of the prompt that are kept as context of the first generated tokens.
CONTEXT = 8

_NOTHING = np.zeros(0, np.int32)


class TextRecorder:
    """The generated text of up to `slots` requests, `max_length` tokens each, prompt included."""

    def __init__(self, slots: int, max_length: int) -> None:
        warm_up(record_rows)
        # Untouched pages of zeroed memory cost nothing.
        self._texts = np.zeros((slots, max_length), np.int32)
        # Of the row: first token kept, read up to; of the slot: most tokens it ever held.
        self._spans = np.zeros((slots, 3), np.int32)
        self._written = 0  # tokens, the sum of the last column
        self._free = list(range(slots - 1, -1, -1))

    @property
    def nbytes(self) -> int:
        """Memory that was ever written to; the system gave no other."""
        return self._written * self._texts.itemsize

    def open(self) -> int:
        """A slot for another request, or -1 if there is none left."""
        if not self._free:
            return -1
        slot = self._free.pop()
        self._spans[slot, :2] = -1
        return slot

    def peek(self, slot: int, start: int) -> Int32Array:
        """What was recorded from token `start` on; recording goes on."""
        first, end, _ = self._spans[slot]
        return self._texts[slot, first + start : end].copy() if first >= 0 else _NOTHING

    def take(self, slot: int) -> Int32Array:
        """What was recorded, and the slot back: a few tokens of the prompt, then the response."""
        start, end, _ = self._spans[slot]
        self._free.append(slot)
        return self._texts[slot, start:end].copy() if start >= 0 else _NOTHING

    def record(
        self,
        slots: Int32Array,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: npt.NDArray[np.bool_],
    ) -> None:
        """Copy what is new in each row; a slot's first row ends with its first generated token.

        Args:
            slots: int32[B], a negative one skips the row.
            token_ids, num_tokens, eligible: as for `Source.locate`.
        """
        self._written += record_rows(
            self._texts, self._spans, slots, token_ids, num_tokens, eligible
        )


@kernel(INT32_2D, INT32_2D, GIVEN_INT32, GIVEN_INT32_2D, GIVEN_INT32, given(types.boolean))
def record_rows(texts, spans, slots, token_ids, num_tokens, eligible):
    """See `TextRecorder.record`; returns the tokens that slots hold beyond what they ever held."""
    more = 0
    for row in range(slots.size):
        slot = slots[row]
        if slot < 0 or not eligible[row]:
            continue
        length = min(np.int64(num_tokens[row]), texts.shape[1], token_ids.shape[1])
        if spans[slot, 0] < 0:
            spans[slot, 0] = spans[slot, 1] = max(0, length - 1 - CONTEXT)
        if length < spans[slot, 0]:  # cut to before the first token kept
            spans[slot, 0] = length
        for position in range(spans[slot, 1], length):
            texts[slot, position] = token_ids[row, position]
        spans[slot, 1] = length
        beyond = max(0, length - spans[slot, 0] - spans[slot, 2])
        spans[slot, 2] += beyond
        more += beyond
    return more
