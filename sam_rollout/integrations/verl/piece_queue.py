"""A bounded queue of text pieces for one receiver: another server, or an engine."""

from __future__ import annotations

from collections import deque

# Memory of a piece's tuple in bytes, in addition to the tokens.
PIECE_BYTES = 400


class PieceQueue:
    """A queue of text pieces that drops its oldest pieces if they take more than `most_bytes`.

    Each call of `take` returns a message of at most `message_bytes`. A larger piece is a message by
    itself.
    """

    def __init__(self, most_bytes: int, message_bytes: int) -> None:
        self._most_bytes, self._message_bytes = most_bytes, message_bytes
        self._pieces: deque[tuple] = deque()
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._pieces)

    def put(self, piece: tuple) -> int:
        """Append a piece, given as a tuple of its fields; return how many pieces were dropped.

        Raises:
            TypeError: The piece is not a sequence that ends with bytes.
        """
        self._nbytes += _size(piece)
        self._pieces.append(piece)
        before = len(self._pieces)
        while self._nbytes > self._most_bytes:
            self._pop()
        return before - len(self._pieces)

    def take(self) -> list[tuple]:
        """Remove and return the next message; it is empty if the queue is empty."""
        message: list[tuple] = []
        room = self._message_bytes
        while self._pieces and (not message or _size(self._pieces[0]) <= room):
            message.append(self._pop())
            room -= _size(message[-1])
        return message

    def _pop(self) -> tuple:
        piece = self._pieces.popleft()
        self._nbytes -= _size(piece)
        return piece


def _size(piece: tuple) -> int:
    return PIECE_BYTES + len(piece[-1])
