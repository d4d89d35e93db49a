"""Ended responses of a run, from which its next automaton is made.

The newest ones stay in memory, 4 bytes per token; those of a run before this one come from disk
(`responses.py`), and behind them a corpus fills what room is left. An automaton of them is made in
a thread and a pool of its own, most of it without the GIL: no engine step waits for it. What ends
meanwhile it reads like texts that move there (`text_moves.py`). Responses of validation are not
kept: they would take the place of those that training drafts from.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from sam_rollout.automaton.interface import (
    LARGEST_AUTOMATON,
    Int32Array,
    Int64Array,
    places_of,
)
from sam_rollout.core.identity import TRAIN_SPLIT
from sam_rollout.sources.support.responses import submit
from sam_rollout.sources.support.seeds import Seed, empty_seed, read_texts

logger = logging.getLogger(__name__)

# Of the source's memory, for kept texts: they take 4 of the 60 bytes per token of an automaton, so
# this is what an automaton of 6/16 of the memory is made of.
_SHARE = 1 / 40
# Of these, what may be added to an automaton that was made: 3/32 of the memory.
_LATE_SHARE = 1 / 4


class Room(NamedTuple):
    """How much text an automaton may be made of; what none is left of allows none."""

    tokens: int
    places: int  # that texts take there
    nbytes: int


@dataclasses.dataclass
class _Making:
    """An automaton that is being made, or waits to be taken."""

    seed: Seed
    made: Future[Seed]
    room: Room  # of the whole
    since: int = 0  # texts kept after those that it is being made of


class KeptTexts:
    """What a run's requests have written.

    Short texts are bounded in number, too: in an automaton each takes whole blocks of places.

    Args:
        max_bytes: memory of the source; a 40th of it is for texts.
        executor: where automata are made, one after the other; by default a thread of its own.

    Attributes:
        most_tokens: that are kept.
        failures: errors of making automata, survived by going on without.
    """

    def __init__(self, max_bytes: int, executor: Executor | None = None) -> None:
        self.most_tokens = min(int(max_bytes * _SHARE) // 4, LARGEST_AUTOMATON // 4)
        # As many as an automaton may be made of where each takes one block, 16 bytes per place.
        most_places = min(max_bytes // 2 // 16, LARGEST_AUTOMATON // 4)
        self._most_texts = most_places // places_of(1)
        self._executor = executor or ThreadPoolExecutor(1, "sam-run-texts")
        self._kept: deque[Int32Array] = deque()  # of training, oldest first
        self._corpus: list[Int32Array] = []  # newest first
        self._tokens = 0  # of both
        self._making: dict[str, _Making] = {}  # by split
        self.failures = 0

    @property
    def nbytes(self) -> int:
        """Texts, and automata that are being made."""
        making = sum(max(one.seed.pool.nbytes, 0) for one in self._making.values())
        return 4 * self._tokens + making

    def keep(self, text: Int32Array) -> None:
        """Keep a response of training that has ended."""
        text = text[-self.most_tokens :]
        self._kept.append(text)
        self._tokens += len(text)
        if (making := self._making.get(TRAIN_SPLIT)) is not None:
            making.since += 1
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

    def make(self, split: str, room: Room, nbytes_of: Callable[[Int64Array], Int64Array]) -> None:
        """Begin to make an automaton of the newest texts; of none, nothing.

        Args:
            split: of the texts.
            room: for them; its places and bytes for those that are added later, too.
            nbytes_of: what texts of so many tokens take there.
        """
        if min(room) <= 0:
            return
        count = self._count() if split == TRAIN_SPLIT else 0
        texts = self._newest(count, room, nbytes_of)
        seed = empty_seed()
        self._making[split] = _Making(seed, submit(self._executor, read_texts, seed, texts), room)

    def is_making(self, split: str) -> bool:
        """Whether an automaton is being made, or waits to be taken."""
        return split in self._making

    def take(self, split: str) -> tuple[Seed, list[Int32Array]] | None:
        """The automaton that was being made, and what has ended meanwhile, as far as it fits there.

        None while it is not finished, or if that failed.
        """
        making = self._making[split]
        if not making.made.done():
            return None
        del self._making[split]
        if (error := making.made.exception()) is not None:
            if not self.failures:
                logger.warning(
                    "Older texts of the run cannot be taken over; the rollout continues without.",
                    exc_info=error,
                )
            self.failures += 1
            return None
        seed = making.made.result()
        pool, automaton, _ = seed
        places = making.room.places - pool.places_of_automaton(automaton)
        tokens = int(self.most_tokens * _LATE_SHARE)
        room = Room(tokens, places, making.room.nbytes - pool.nbytes)
        nbytes_of = functools.partial(pool.nbytes_of_texts, automaton)
        since = min(making.since, len(self._kept))  # not of the corpus
        return seed, self._newest(since, room, nbytes_of)

    def wait(self) -> None:
        """Wait until all automata are made."""
        for making in self._making.values():
            making.made.exception()

    def _count(self) -> int:
        return len(self._kept) + len(self._corpus)

    def _shorten(self) -> None:
        """Forget the oldest texts until the rest fits."""
        while self._tokens > self.most_tokens or self._count() > self._most_texts:
            oldest = self._corpus.pop() if self._corpus else self._kept.popleft()
            self._tokens -= len(oldest)

    def _newest(
        self, count: int, room: Room, nbytes_of: Callable[[Int64Array], Int64Array]
    ) -> list[Int32Array]:
        """Of the last `count` texts, as many of the newest as fit, oldest first; see `make`."""
        texts = list(islice(chain(reversed(self._kept), self._corpus), count))
        tokens = np.fromiter(map(len, texts), np.int64, len(texts))
        needed = np.cumsum([tokens, places_of(tokens), nbytes_of(tokens)], axis=1)
        fits = (needed <= np.array(room)[:, None]).all(axis=0)
        return texts[: int(fits.sum())][::-1]  # what is needed only grows
