"""Keeps the ended responses of a run, from which the run's next automaton is made.

Responses of validation are not kept, because they would displace responses of training.
"""

from collections import deque
from collections.abc import Callable
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, Int32Array, Int64Array, places_of

# Kept texts may take this share of the source's memory. A token takes 4 bytes in a kept text and 60
# in an automaton. So an automaton of all kept texts takes 15/40 of the memory (`run._SUCCESSOR`).
_SHARE = 1 / 40


class Room(NamedTuple):
    """Limits on the texts of a new automaton; a limit of 0 or less allows no text."""

    tokens: int
    places: int  # number of tokens, with each text rounded up to whole blocks
    nbytes: int  # size of the automaton


class KeptTexts:
    """Keeps the newest responses of a run, and older texts while there is room.

    The older texts come from the previous run and from a corpus. `corpus` is ordered from old to
    new, and its texts count as older than any response.
    """

    def __init__(self, max_bytes: int, corpus: list[Int32Array]) -> None:
        self.most_tokens = min(int(max_bytes * _SHARE) // 4, LARGEST_AUTOMATON // 4)
        # Each text takes at least one block of an automaton, which limits the number of texts.
        most_places = min(max_bytes // 2 // 16, LARGEST_AUTOMATON // 4)
        self._most_texts = most_places // places_of(1)
        self._kept: deque[Int32Array] = deque()  # responses of training, oldest first
        self._corpus = corpus[::-1]  # texts of the corpus, newest first
        self._tokens = sum(map(len, corpus))  # tokens in `_kept` and `_corpus` together
        self.added = 0  # number of calls of `keep` so far
        self._shorten()

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
        """Keep as many of the previous run's texts (old to new) as fit; return whether any fits."""
        newer = len(self._kept)
        texts = texts[-self._most_texts :]
        self._kept.extendleft(reversed(texts))
        self._tokens += sum(map(len, texts))
        self._shorten()
        return len(self._kept) > newer

    def newest(
        self,
        room: Room,
        nbytes_of: Callable[[Int64Array], Int64Array],
        most_texts: int = LARGEST_AUTOMATON,
    ) -> list[Int32Array]:
        """Return the newest texts that fit into the room, ordered from old to new.

        `nbytes_of` maps lengths of texts in tokens, int64[texts], to their bytes in the automaton,
        int64[texts]. Only the newest texts are considered; `most_texts` limits their number.
        """
        texts = list(islice(chain(reversed(self._kept), self._corpus), most_texts))
        tokens = np.fromiter(map(len, texts), np.int64, len(texts))
        needed = np.cumsum([tokens, places_of(tokens), nbytes_of(tokens)], axis=1)
        fits = (needed <= np.array(room)[:, None]).all(axis=0)
        return texts[: int(fits.sum())][::-1]  # `needed` grows, so the texts that fit come first

    def _shorten(self) -> None:
        while (
            self._tokens > self.most_tokens
            or len(self._kept) + len(self._corpus) > self._most_texts
        ):
            oldest = self._corpus.pop() if self._corpus else self._kept.popleft()
            self._tokens -= len(oldest)
