"""Moves live texts from one automaton to another.

The new automaton reads a moving text from the start. An engine step reads a bounded number of
tokens from all moving texts together. A request drafts from the old automaton until the new one has
read its whole text. A text that ends while it moves is still read, because other requests draft
from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from sam_rollout.automaton.interface import Int32Array, places_of

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool

# An engine step reads at most this number of tokens from live texts, and at most the same number
# from ended texts.
TOKENS_PER_STEP = 2048


class MovingTexts:
    """Keeps the slots that moving requests have in new automata, until their texts are read."""

    def __init__(self, pool: AutomatonPool) -> None:
        self._pool = pool
        self._slots: dict[str, tuple[int, int]] = {}  # request -> new slot, new automaton
        self._ended: deque[tuple[Int32Array, int, int]] = deque()  # text, slot, automaton

    def begin(self, slots: Mapping[str, int], automaton: int) -> None:
        """Begin to move requests to an automaton; `slots` maps them to their present slots."""
        for request_id, slot in slots.items():
            moved = self._pool.open(automaton, self._pool.group_of(slot))
            self._slots[request_id] = (moved, automaton)

    def finish(self, request_id: str, text: Int32Array | None) -> None:
        """Forget a request that ended; if its text was moving, queue `text` to be read instead."""
        slot, automaton = self._slots.pop(request_id, (None, None))
        if slot is None or automaton is None:
            return
        group = self._pool.group_of(slot)
        self._pool.close(slot)
        if text is not None:
            self.read_to_end(text, automaton, group)

    def read_to_end(self, text: Int32Array, automaton: int, group: int = 0) -> None:
        """Queue a text that has ended, int32[length], for an automaton to read."""
        self._ended.append((text, self._pool.open(automaton, group), automaton))

    def drop_all_to(self, automaton: int) -> None:
        """Drop all texts that move to an automaton, before it is freed."""
        for request_id in [one for one, (_, target) in self._slots.items() if target == automaton]:
            self.finish(request_id, None)
        for _, slot, target in self._ended:
            if target == automaton:
                self._pool.close(slot)
        self._ended = deque(one for one in self._ended if one[2] != automaton)

    def read(
        self,
        request_ids: Sequence[str],
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
    ) -> list[tuple[int, int, int]]:
        """Read more of the moving texts; texts with the fewest unread tokens come first.

        The arguments are those of `Source.bind` and `Source.catch_up`. Returns the row, new slot
        and new automaton of each request whose text has now been read to its end.
        """
        if self._ended:
            self._read_ended()
        if not self._slots:
            return []
        found = [
            (row, self._slots[request_id][0])
            for row, request_id in enumerate(request_ids)
            if request_id in self._slots and eligible[row]
        ]
        if not found:
            return []
        rows, slots = np.array(found, np.int32).T.copy()
        read = np.array([self._pool.length(slot) for slot in slots.tolist()], np.int32)
        missing = np.maximum(num_tokens[rows] - read, 0)
        order = np.argsort(missing, kind="stable")
        rows, slots, read, missing = rows[order], slots[order], read[order], missing[order]
        before = np.cumsum(missing) - missing
        now = np.clip(TOKENS_PER_STEP - before, 0, missing).astype(np.int32)
        some = now > 0
        self._pool.extend(slots[some], rows[some], token_ids, (read + now)[some])
        done = now == missing
        return [(row, *self._slots.pop(request_ids[row])) for row in rows[done].tolist()]

    def _read_ended(self) -> None:
        """Read more of the ended texts, in order; a text's tokens are counted in whole blocks."""
        room = TOKENS_PER_STEP
        while self._ended and room > 0:
            text, slot, _ = self._ended[0]
            before = self._pool.length(slot)
            length = min(before + room, len(text))
            slots, rows, lengths = np.array([[slot], [0], [length]], np.int32)
            self._pool.extend(slots, rows, text[None], lengths)
            room -= places_of(length - before)
            if length == len(text):
                self._ended.popleft()
                self._pool.close(slot)
