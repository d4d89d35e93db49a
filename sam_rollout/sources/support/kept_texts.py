"""Ended responses of a run, from which its next automaton is made.

The newest ones stay in memory, 4 bytes per token; those of a run before this one come from disk
(`responses.py`), and behind them a corpus fills what room is left. Responses of validation are not
kept: they would take the place of those that training drafts from.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from sam_rollout.automaton.interface import (
    LARGEST_AUTOMATON,
    Int32Array,
    Int64Array,
    places_of,
)

# Of the source's memory, for kept texts: they take 4 of the 60 bytes per token of an automaton, so
# this is what an automaton of 6/16 of the memory is made of.
_SHARE = 1 / 40


class Room(NamedTuple):
    """How much text an automaton may be made of; what none is left of allows none."""

    tokens: int
    places: int  # that texts take there
    nbytes: int


class KeptTexts:
    """What a run's requests have written.

    Short texts are bounded in number, too: in an automaton each takes whole blocks of places.

    Args:
        max_bytes: memory of the source; a 40th of it is for texts.

    Attributes:
        most_tokens: that are kept.
        added: texts so far that this run's requests wrote.
    """

    def __init__(self, max_bytes: int) -> None:
        self.most_tokens = min(int(max_bytes * _SHARE) // 4, LARGEST_AUTOMATON // 4)
        # As many as an automaton may be made of where each takes one block, 16 bytes per place.
        most_places = min(max_bytes // 2 // 16, LARGEST_AUTOMATON // 4)
        self._most_texts = most_places // places_of(1)
        self._kept: deque[Int32Array] = deque()  # of training, oldest first
        self._corpus: list[Int32Array] = []  # newest first
        self._tokens = 0  # of both
        self.added = 0

    @property
    def nbytes(self) -> int:
        """Memory of the texts."""
        return 4 * self._tokens

    def keep(self, text: Int32Array) -> None:
        """Keep a response of training that has ended."""
        text = text[-self.most_tokens :]
        self._kept.append(text)
        self._tokens += len(text)
        self.added += 1
        self._shorten()

    def keep_older(self, texts: list[Int32Array]) -> bool:
        """Keep texts of the run before this one; whether newer ones left room for some.

        Args:
            texts: oldest first.
        """
        newer = len(self._kept)
        texts = texts[-self._most_texts :]
        self._kept.extendleft(reversed(texts))
        self._tokens += sum(map(len, texts))
        self._shorten()
        return len(self._kept) > newer

    def keep_corpus(self, texts: list[Int32Array]) -> None:
        """Keep texts that are older than all that the run writes."""
        self._corpus = texts[::-1]
        self._tokens += sum(map(len, texts))
        self._shorten()

    def newest(
        self,
        room: Room,
        nbytes_of: Callable[[Int64Array], Int64Array],
        most_texts: int = LARGEST_AUTOMATON,
    ) -> list[Int32Array]:
        """As many of the newest texts as fit, oldest first.

        Args:
            room: for them.
            nbytes_of: what texts of so many tokens take there.
            most_texts: that are looked at.
        """
        texts = list(islice(chain(reversed(self._kept), self._corpus), most_texts))
        tokens = np.fromiter(map(len, texts), np.int64, len(texts))
        needed = np.cumsum([tokens, places_of(tokens), nbytes_of(tokens)], axis=1)
        fits = (needed <= np.array(room)[:, None]).all(axis=0)
        return texts[: int(fits.sum())][::-1]  # what is needed only grows

    def _shorten(self) -> None:
        """Forget the oldest texts until the rest fits."""
        while (
            self._tokens > self.most_tokens
            or len(self._kept) + len(self._corpus) > self._most_texts
        ):
            oldest = self._corpus.pop() if self._corpus else self._kept.popleft()
            self._tokens -= len(oldest)
