"""Ended responses of a run, kept so that its next automaton does not begin empty.

The newest ones stay in memory, 4 bytes per token. With a folder they also go to disk, where a run
that is resumed finds them (`history_store.py`). An automaton of them is made in a thread and a pool
of its own, most of it without the GIL: no engine step waits for it. Responses of validation are not
kept: they would take the place of those that training drafts from.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, Int32Array
from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.sources.contract import Limits
from sam_rollout.sources.support.moving import TOKENS_PER_STEP

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool
    from sam_rollout.sources.support.history_store import HistoryStore

logger = logging.getLogger(__name__)

# Of the source's memory, for kept texts: they take 4 of the 60 bytes per token of an automaton, so
# this is what an automaton of 6/16 of the memory is made of.
_SHARE = 1 / 40
# Of these, what may be added to an automaton that is being made: 3/32 of the memory.
_LATE_SHARE = 1 / 4
# Of the folder: four times what is ever read back, as the newest steps may be sampled again. All of
# it is walked when a run is resumed, beside the engine. A segment, a 256th, holds a response.
_DISK_BYTES = 4 * LARGEST_AUTOMATON
_LONGEST_ON_DISK = _DISK_BYTES // 256 // 4 - 16  # tokens; of a longer response its end is written
_LARGEST_BACKLOG = 64 << 20  # bytes that wait for the disk; responses beyond it stay in memory only
_MOST_READ = 1 << 16  # responses, when a run is resumed

_NO_SLOT = -1


class Seeded(NamedTuple):
    """An automaton made of kept texts, its pool's only one."""

    pool: AutomatonPool
    automaton: int
    tokens: int


class _Live(NamedTuple):
    split: str
    step: int
    slot: int  # of the recorder


@dataclasses.dataclass
class _Making:
    """An automaton that is being made, or waits to be taken."""

    pool: AutomatonPool
    made: Future[Seeded]
    most_bytes: int  # of the pool
    since: int = 0  # texts kept after those that it is being made of
    is_late: bool = False  # made, and late texts are being added


class KeptTexts:
    """What a run's requests have written.

    Args:
        limits: of the engine.
        max_bytes: memory of the source; a 40th of it is for texts.
        path: folder; empty for none.
        executor: where slow work is done, one task after the other; by default a thread of its own.

    Attributes:
        failures: errors survived by keeping texts in memory only, or by not keeping them.
    """

    def __init__(
        self, limits: Limits, max_bytes: int, path: str = "", executor: Executor | None = None
    ) -> None:
        from sam_rollout.automaton.recorder import TextRecorder

        # Of requests that are preempted, too; beyond that, responses are not kept.
        self._recorder = TextRecorder(2 * limits.max_rows + 16, limits.max_model_len)
        self._most_tokens = min(int(max_bytes * _SHARE) // 4, LARGEST_AUTOMATON // 4)
        self._executor = executor or ThreadPoolExecutor(1, "sam-run-texts")
        folder = Path(path).expanduser()
        self._store = _Store(folder, limits.vocab_size) if path else None
        self._live: dict[str, _Live] = {}
        self._slots = np.full(limits.max_rows, _NO_SLOT, np.int32)
        self._kept: deque[Int32Array] = deque()  # of training, oldest first
        self._tokens = 0  # of kept texts
        self._reading: Future[list[Int32Array]] | None = None  # what lies on disk
        self._is_met = False  # whether training's texts were asked for
        self._making: dict[str, _Making] = {}  # by split
        self._writing: dict[Future[bool], int] = {}  # -> bytes
        self._off = False
        self.failures = 0

    @property
    def nbytes(self) -> int:
        """Texts, and automata that are being made."""
        making = sum(max(one.pool.nbytes, 0) for one in self._making.values())
        return self._recorder.nbytes + 4 * self._tokens + making

    @property
    def refused(self) -> int:
        """Texts on disk that cannot be drafted from."""
        return 0 if self._store is None else self._store.refused

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `Source.bind`. When training's first request comes, older texts are read from disk."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            live = self._live.get(request_id)
            if live is None and identity is not None:
                live = _Live(identity.split, identity.step, self._recorder.open())
                self._live[request_id] = live
                # Not one outside training, an engine's warm-up say: its step is before all others.
                is_of_training = identity.split == TRAIN_SPLIT and identity.step >= 0
                if is_of_training and not self._is_met:
                    self._meet(identity.step)
            self._slots[row] = _NO_SLOT if live is None else live.slot

    def record(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Copy what is new in each row of the batch that is bound."""
        self._recorder.record(self._slots[: len(num_tokens)], token_ids, num_tokens, eligible)

    def finish(self, request_ids: Iterable[str]) -> dict[str, Int32Array]:
        """Keep training's texts of requests that ended, and return all; unknown ids are skipped."""
        texts = {}
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is None or live.slot == _NO_SLOT:
                continue
            self._slots[self._slots == live.slot] = _NO_SLOT
            text = self._recorder.take(live.slot)
            if len(text):
                texts[request_id] = text
                if live.split == TRAIN_SPLIT:
                    self._keep(text)
                    self._write(live.step, text)
        return texts

    def arrived(self, split: str) -> bool:
        """Whether texts that an interrupted run had kept on disk have just come in; said once.

        False where all of them had to go again: newer ones are kept in their place.
        """
        if split != TRAIN_SPLIT or self._reading is None or not self._reading.done():
            return False
        reading, self._reading = self._reading, None
        try:
            texts = reading.result()
        except Exception:
            self._fail("The texts of the run before this one cannot be read")
            return False
        newer = len(self._kept)
        self._kept.extendleft(reversed(texts))  # older than all that was kept since
        self._tokens += sum(map(len, texts))
        self._shorten()
        return len(self._kept) > newer

    def make(self, split: str, tokens: int, nbytes: int, nbytes_of: Callable[[int], int]) -> None:
        """Begin to make an automaton of the newest texts; of none, nothing.

        Args:
            split: of the texts.
            tokens: most that they may have.
            nbytes: most that they may take there, with those that are added later.
            nbytes_of: what a text of so many tokens takes there.
        """
        from sam_rollout.automaton.pool import AutomatonPool

        if min(tokens, nbytes) <= 0:
            return
        count = len(self._kept) if split == TRAIN_SPLIT else 0
        texts = self._newest(count, tokens, nbytes, nbytes_of)
        pool = AutomatonPool()
        made = self._submit(_make, Seeded(pool, pool.create(), 0), texts)
        self._making[split] = _Making(pool, made, nbytes)

    def is_making(self, split: str) -> bool:
        """Whether an automaton is being made, or waits to be taken."""
        return split in self._making

    def take(self, split: str) -> Seeded | None:
        """The automaton that was being made; None while it is not finished, or if that failed.

        What has ended meanwhile is added beside the engine, too, but only once: texts may end all
        the time. The newest of what has ended during that is read here, so few tokens that no
        engine step is held up. What is left out, a later automaton has.
        """
        making = self._making[split]
        if not making.made.done():
            return None
        try:
            seeded = making.made.result()
            room = making.most_bytes - seeded.pool.nbytes
            nbytes_of = functools.partial(seeded.pool.nbytes_of_text, seeded.automaton)
            if making.since and not making.is_late:
                tokens = int(self._most_tokens * _LATE_SHARE)
                late = self._newest(making.since, tokens, room, nbytes_of)
                making.made = self._submit(_make, seeded, late)
                making.since, making.is_late = 0, True
                return None
            last = self._newest(making.since, TOKENS_PER_STEP, room, nbytes_of)
            seeded = _make(seeded, last)
        except Exception:
            del self._making[split]
            self._fail("Older texts of the run cannot be taken over")
            return None
        del self._making[split]
        return seeded

    def wait(self) -> None:
        """Wait until all work handed over is done."""
        futures: list[Future[Any]] = [*self._writing, *(one.made for one in self._making.values())]
        if self._reading is not None:
            futures.append(self._reading)
        for future in futures:
            future.exception()

    def _meet(self, step: int) -> None:
        self._is_met = True
        if self._store is not None:
            self._reading = self._submit(self._store.read, TRAIN_SPLIT, step, self._most_tokens)

    def _keep(self, text: Int32Array) -> None:
        text = text[-self._most_tokens :]
        self._kept.append(text)
        self._tokens += len(text)
        if (making := self._making.get(TRAIN_SPLIT)) is not None:
            making.since += 1
        self._shorten()

    def _shorten(self) -> None:
        """Forget the oldest texts until the rest fits."""
        while self._tokens > self._most_tokens:
            self._tokens -= len(self._kept.popleft())

    def _newest(
        self, count: int, tokens: int, nbytes: int, nbytes_of: Callable[[int], int]
    ) -> list[Int32Array]:
        """Of the last `count` texts, newest first, as many as fit; see `make`."""
        texts = []
        for text in islice(reversed(self._kept), count):
            tokens -= len(text)
            nbytes -= nbytes_of(len(text))
            if min(tokens, nbytes) < 0:
                break
            texts.append(text)
        return texts

    def _write(self, step: int, text: Int32Array) -> None:
        for done in [future for future in self._writing if future.done()]:
            del self._writing[done]
            if done.exception() is not None:
                self._fail("Texts of the run cannot be written", done.exception())
        if self._store is None or self._off:
            return
        text = text[-_LONGEST_ON_DISK:]
        if sum(self._writing.values()) + text.nbytes <= _LARGEST_BACKLOG:
            written = self._submit(self._store.append, TRAIN_SPLIT, step, text)
            self._writing[written] = text.nbytes

    def _submit(self, task: Callable[..., Any], *arguments: object) -> Future[Any]:
        try:
            return self._executor.submit(task, *arguments)
        except RuntimeError as error:  # no thread to be had
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed

    def _fail(self, what: str, error: BaseException | None = None) -> None:
        """Say it once; no more is written from now on."""
        self.failures += 1
        if not self._off:
            logger.warning(
                "%s; the rollout continues without.", what, exc_info=error if error else True
            )
        self._off = True


def _make(seeded: Seeded, newest_first: list[Int32Array]) -> Seeded:
    """Read texts into an automaton, each by itself, the oldest first."""
    pool, automaton, tokens = seeded
    first = np.zeros(1, np.int32)
    for text in reversed(newest_first):
        slot = pool.open(automaton)
        lengths = np.array([len(text)], np.int32)
        pool.extend(np.array([slot], np.int32), first, text[None], lengths)
        pool.close(slot)
        tokens += len(text)
    return Seeded(pool, automaton, tokens)


class _Store:
    """The folder, opened by the first task: ranks whose drafts are unused never have one."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path, self._vocab_size = path, vocab_size
        self._opened: HistoryStore | None = None

    @property
    def refused(self) -> int:
        """Return what the folder has counted."""
        return 0 if self._opened is None else self._opened.refused

    def read(self, split: str, before_step: int, max_tokens: int) -> list[Int32Array]:
        """The newest texts of earlier steps, of all engines that share the folder, oldest first."""
        store = self._open()
        store.refresh()
        return store.read(split, before_step, max_tokens)

    def append(self, split: str, step: int, text: Int32Array) -> bool:
        """Write a text; False if it is too long for a segment."""
        return self._open().append(split, step, text)

    def _open(self) -> HistoryStore:
        if self._opened is None:
            from sam_rollout.sources.support.history_store import HistoryStore

            self._opened = HistoryStore(self._path, _DISK_BYTES, _MOST_READ, self._vocab_size)
        return self._opened
