"""Exchanges siblings' texts with other engines.

No engine waits for a piece, and no piece is sent twice. A lost piece only lowers acceptance.

Two queues have limited lengths: ended texts wait to be sent, and received texts wait to be read.
Surplus texts are dropped. The automata read a few of the received tokens in each engine step.
Waiting texts count towards `max_bytes`, and are dropped before any automaton is given up for lack
of memory.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import GroupKey
from sam_rollout.sources.contract import Limits, Piece
from sam_rollout.sources.support.live_texts import NO_SLOT, number_of

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool
    from sam_rollout.sources.support.responses import Responses

logger = logging.getLogger(__name__)

Place = tuple[GroupKey, int | None]  # a group, and its automaton once it has one

# Maximum number of other engines' tokens that are read per engine step. Drafts save time only
# while few requests run. Their siblings in other engines then write fewer tokens per step than this
# limit.
TOKENS_PER_STEP = 512
# Maximum number of other engines' texts that may wait to be read or continued.
MOST_TEXTS = 1024
# Shares of `max_bytes`. Texts that wait to be sent may take the share _WAITING_SHARE, and texts
# that wait to be read may take an equal share. While automata and received texts together exceed
# the share _READING_SHARE, other engines' texts are not read.
_WAITING_SHARE, _READING_SHARE = 1 / 8, 3 / 4


class OwnTexts:
    """Keeps the engine's own texts until they have been handed out."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self.room = 0  # maximum number of ended texts that wait; beyond it, the oldest are dropped
        self._sent: dict[str, tuple[str, int]] = {}  # request -> name, number of tokens sent
        self._ended: deque[Piece] = deque()  # last pieces of ended texts, not yet handed out
        self._made = 0
        self.nbytes = 0  # memory of `_ended`

    def _name_and_start(self, request_id: str) -> tuple[str, int]:
        """Return the response's name, and the index of the next token to hand out."""
        if request_id not in self._sent:
            self._made += 1
            self._sent[request_id] = str(self._made), 0
        return self._sent[request_id]

    def finish(self, request_ids: Iterable[str]) -> None:
        """Make the last pieces of requests that ended; unknown ids are skipped."""
        for request_id in request_ids:
            ended = self._responses.ended.get(request_id)
            if ended is not None and self.room:
                name, start = self._name_and_start(request_id)
                tokens = ended.text[start:].astype("<i4", copy=False).tobytes()
                self._ended.append(Piece(*ended.identity.group_key, name, start, True, tokens))
                self.nbytes += len(tokens)
                if len(self._ended) > self.room:
                    self.nbytes -= len(self._ended.popleft().tokens)
            self._sent.pop(request_id, None)

    def forget_ended(self) -> None:
        """Drop the last pieces of ended texts that were not handed out."""
        self._ended.clear()
        self.nbytes = 0

    def pieces(self, origin: str) -> list[Piece]:
        """Return tokens sampled since the last call; responses are named `<origin>/<number>`."""
        pieces = list(self._ended)
        self.forget_ended()
        for request_id, identity in self._responses.live() if self.room else ():
            name, start = self._name_and_start(request_id)
            tokens = self._responses.peek(request_id, start)
            if len(tokens):
                self._sent[request_id] = name, start + len(tokens)
                sent = tokens.astype("<i4", copy=False).tobytes()
                pieces.append(Piece(*identity.group_key, name, start, False, sent))
        return [piece._replace(response=f"{origin}/{piece.response}") for piece in pieces]


class SharedTexts:
    """Sends and receives texts; before the first exchange, no text is kept.

    Args:
        max_bytes: memory for all texts of siblings, from this engine and others.
        responses: the record of the engine's responses.
        place_of: maps a piece to its group and automaton, or to None if the piece is not wanted.
        keep_ended: called with the group and tokens of a text that has ended and was read.
    """

    def __init__(
        self,
        pool: AutomatonPool,
        limits: Limits,
        max_bytes: int,
        responses: Responses,
        place_of: Callable[[Piece], Place | None],
        keep_ended: Callable[[GroupKey, Int32Array], None],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._max_bytes = max_bytes
        self._place_of = place_of
        self._keep_ended = keep_ended
        self.own = OwnTexts(responses)
        self._is_asked = False
        self._tokens_read = self._tokens_missed = 0
        self._make(room=0)

    def _make(self, room: int) -> None:
        """Allocate a row for each text that may wait to be read; `room` limits their number."""
        rows = min(MOST_TEXTS, room)
        # Each row has room for the longest text: untouched pages of zeroed memory cost nothing.
        self._texts = np.zeros((rows, self._limits.max_model_len), np.int32)
        self._touched = np.zeros(rows, np.int32)  # maximum number of tokens that the row has held
        self._known = np.zeros(rows, np.int32)  # tokens that the row holds
        self._done = np.zeros(rows, np.int32)  # number of the row's tokens that were read
        self._slots = np.full(rows, NO_SLOT, np.int32)  # NO_SLOT if the group has no automaton yet
        self._starts = np.zeros(rows, np.int32)  # the first token's index in its response
        self._ended = np.zeros(rows, bool)
        self._free = list(range(rows - 1, -1, -1))
        self._place: dict[str, tuple[GroupKey, int]] = {}  # response -> its group and row
        self._members: dict[GroupKey, set[str]] = {}  # group -> its responses
        self._touched_tokens = 0  # sum of `_touched`
        self._unread = 0  # unread tokens of all rows
        self._next = 0  # the row with which the next `read` begins

    @property
    def nbytes(self) -> int:
        """Bytes of waiting texts in both directions, and of rows that earlier texts have filled."""
        return self.own.nbytes + self._touched_tokens * 4

    def counters(self) -> dict[str, int]:
        """Return counts of other engines' tokens, read and missed."""
        return {
            "shared_tokens": self._tokens_read,
            "shared_missed_tokens": self._tokens_missed,
        }

    def exchange(self, origin: str, pieces: Iterable[Any]) -> list[Piece]:
        """Implement `Source.exchange`.

        Raises:
            ValueError: A piece would make its text longer than the engine's longest text.
        """
        if not self._is_asked:
            self._start()
        for raw in pieces:
            piece = Piece(*raw)
            tokens = np.frombuffer(piece.tokens, "<i4").astype(np.int32, copy=False)
            place = self._place_of(piece)
            if place is None:
                self._tokens_missed += len(tokens)
            else:
                self._take(*place, piece, tokens)
        return self.own.pieces(origin)

    def _start(self) -> None:
        room = int(self._max_bytes * _WAITING_SHARE) // (4 * self._limits.max_model_len)
        if not room:
            logger.warning(
                "sam.sources.prompt.max_bytes = %d: an eighth cannot hold a text of %d tokens, "
                "the engine's longest. No text is shared with other engines; drafting goes on.",
                self._max_bytes,
                self._limits.max_model_len,
            )
        self.own.room = room
        self._make(room)
        self._is_asked = True

    def _take(
        self, group: GroupKey, automaton: int | None, piece: Piece, tokens: Int32Array
    ) -> None:
        """Keep a piece until it is read; after a lost piece, this piece begins a new text."""
        place, row = self._place.get(piece.response, (group, -1))
        if place != group:  # two groups use this name
            self._forget(piece.response)
            row = -1
        if row < 0:
            if not self._free:
                self._tokens_missed += len(tokens)
                return
            row = self._free.pop()
            self._place[piece.response] = (group, row)
            self._members.setdefault(group, set()).add(piece.response)
        elif piece.start != self._starts[row] + self._known[row]:
            self._end(row)
        known = self._known[row]
        if not known:  # a new text
            self._starts[row] = piece.start
            if automaton is not None:
                self.attach(group, automaton)
        # If a row is full, numpy drops a single further token without an error. The automaton would
        # then read beyond the row.
        if known + len(tokens) > self._limits.max_model_len:
            raise ValueError(
                f"the response {piece.response} has more than {self._limits.max_model_len} tokens, "
                "the engine's longest text"
            )
        self._texts[row, known : known + len(tokens)] = tokens
        self._known[row] += len(tokens)
        if (grown := int(self._known[row] - self._touched[row])) > 0:
            self._touched[row] += grown
            self._touched_tokens += grown
        self._unread += len(tokens)
        self._ended[row] = piece.is_last
        if piece.is_last and self._done[row] == self._known[row]:
            self._forget(piece.response)

    def attach(self, group: GroupKey, automaton: int) -> None:
        """Let a group's automaton read the texts of the group from now on."""
        for response in self._members.get(group, ()):
            row = self._place[response][1]
            if self._slots[row] == NO_SLOT:
                self._slots[row] = self._pool.open(automaton, number_of(group))

    def detach(self, group: GroupKey) -> None:
        """Detach a group's texts from its automaton; they wait to be read again from the start."""
        for response in self._members.get(group, ()):
            row = self._place[response][1]
            if self._slots[row] != NO_SLOT:
                self._pool.close(int(self._slots[row]))
                self._slots[row] = NO_SLOT
                self._unread += int(self._done[row])
                self._done[row] = 0

    def forget(self, group: GroupKey) -> None:
        """Drop a group's texts, before its automaton is destroyed."""
        for response in list(self._members.get(group, ())):
            self._forget(response)

    def forget_all(self) -> None:
        """Drop all texts and free their memory."""
        for response in list(self._place):
            self._forget(response)
        self._texts = np.zeros(self._texts.shape, np.int32)
        self._touched[:] = self._touched_tokens = 0

    def end_step(self) -> None:
        """Drop all texts, since the training step is over for all engines."""
        self.own.forget_ended()
        self.forget_all()

    def read(self) -> None:
        """Read at most `TOKENS_PER_STEP` waiting tokens; raise errors of `AutomatonPool.extend`."""
        most_bytes = int(self._max_bytes * _READING_SHARE)
        if not self._unread or self._pool.nbytes + 4 * self._touched_tokens > most_bytes:
            return
        behind = np.where(self._slots != NO_SLOT, self._known - self._done, 0)
        rows = np.flatnonzero(behind)
        rows = np.roll(rows, -int(np.searchsorted(rows, self._next)))  # rows take turns
        lengths = behind[rows]
        lengths = np.minimum(lengths, TOKENS_PER_STEP - (np.cumsum(lengths) - lengths))
        rows, lengths = rows[lengths > 0], lengths[lengths > 0]
        if not len(rows):
            return
        ends = (self._done[rows] + lengths).astype(np.int32)
        self._pool.extend(self._slots[rows], rows.astype(np.int32), self._texts, ends)
        self._next = int(rows[-1]) + 1
        self._done[rows] = ends
        read = int(lengths.sum())
        self._unread -= read
        self._tokens_read += read
        over = set(rows[self._ended[rows] & (ends == self._known[rows])].tolist())
        if over:
            for response in [name for name, (_, row) in self._place.items() if row in over]:
                self._forget(response)

    def _end(self, row: int) -> None:
        """Close a row's text, and count its unread tokens as missed."""
        unread = int(self._known[row] - self._done[row])
        self._unread -= unread
        self._tokens_missed += unread
        if self._slots[row] != NO_SLOT:
            self._pool.close(int(self._slots[row]))
        self._slots[row] = NO_SLOT
        self._known[row] = self._done[row] = 0
        self._ended[row] = False

    def _forget(self, response: str) -> None:
        group, row = self._place.pop(response)
        if self._ended[row] and self._done[row] == self._known[row]:
            self._keep_ended(group, self._texts[row, : self._known[row]].copy())
        self._end(row)
        self._free.append(row)
        members = self._members[group]
        members.discard(response)
        if not members:
            del self._members[group]
