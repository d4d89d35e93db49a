"""Ended responses of a run, kept so that its next automaton does not begin empty.

The newest ones stay in memory, 4 bytes per token. With a folder they also go to disk, where a run
that is resumed finds them (`history_store.py`). An automaton of them is made in a thread and a pool
of its own, most of it without the GIL: no engine step waits for it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, Int32Array
from sam_rollout.identity import RequestIdentity
from sam_rollout.sources.contract import Limits

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool
    from sam_rollout.sources.support.history_store import HistoryStore

logger = logging.getLogger(__name__)

# Of the source's memory, for kept texts: they take 4 of the 50 bytes per token of an automaton, so
# this is what an automaton of 6/16 of the memory is made of.
_SHARE = 1 / 32
# A segment of the folder, a 256th of it, has to hold a response.
_LEAST_DISK_BYTES = 64 << 20
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


class KeptTexts:
    """What a run's requests have written, split by split.

    Args:
        limits: of the engine.
        max_bytes: memory of the source; a 32nd of it is for texts.
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
        self._store = _Store(Path(path).expanduser(), max_bytes) if path else None
        self._live: dict[str, _Live] = {}
        self._slots = np.full(limits.max_rows, _NO_SLOT, np.int32)
        self._kept: dict[str, deque[Int32Array]] = {}  # by split, oldest first
        self._tokens = 0  # of all kept texts
        self._reading: dict[str, Future[list[Int32Array]]] = {}  # split -> what lies on disk
        self._met: set[str] = set()  # splits whose texts were asked for
        self._making: dict[str, tuple[AutomatonPool, Future[Seeded]]] = {}
        self._since: dict[str, list[Int32Array]] = {}  # texts that ended while one is made
        self._writing: dict[Future[bool], int] = {}  # -> bytes
        self._off = False
        self.failures = 0

    @property
    def nbytes(self) -> int:
        """Texts, and automata that are being made."""
        making = sum(max(pool.nbytes, 0) for pool, _ in self._making.values())
        return self._recorder.nbytes + 4 * self._tokens + making

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `Source.bind`. When a split's first request comes, its texts are read from disk."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            live = self._live.get(request_id)
            if live is None and identity is not None:
                live = _Live(identity.split, identity.step, self._recorder.open())
                self._live[request_id] = live
                if identity.split not in self._met:
                    self._meet(identity.split, identity.step)
            self._slots[row] = _NO_SLOT if live is None else live.slot

    def record(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Copy what is new in each row of the batch that is bound."""
        self._recorder.record(self._slots[: len(num_tokens)], token_ids, num_tokens, eligible)

    def finish(self, request_ids: Iterable[str]) -> dict[str, Int32Array]:
        """Keep the texts of requests that ended, and return them; unknown ids are passed over."""
        texts = {}
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is None or live.slot == _NO_SLOT:
                continue
            self._slots[self._slots == live.slot] = _NO_SLOT
            text = self._recorder.take(live.slot)
            if len(text):
                texts[request_id] = text
                self._keep(live.split, text)
                self._write(live, text)
        return texts

    def arrived(self, split: str) -> bool:
        """Whether what an interrupted run had kept on disk has just come in; said once."""
        reading = self._reading.get(split)
        if reading is None or not reading.done():
            return False
        del self._reading[split]
        try:
            texts = reading.result()
        except Exception:
            self._fail("The texts of the run before this one cannot be read")
            return False
        kept = self._kept.setdefault(split, deque())
        kept.extendleft(reversed(texts))  # older than all that was kept since
        self._tokens += sum(map(len, texts))
        self._shorten(split)
        return bool(texts)

    def make(self, split: str, tokens: int) -> None:
        """Begin to make an automaton of the newest texts, of so many tokens at most."""
        from sam_rollout.automaton.pool import AutomatonPool

        texts: list[Int32Array] = []
        for text in reversed(self._kept.get(split, ())):
            tokens -= len(text)
            if tokens < 0:
                break
            texts.append(text)
        pool = AutomatonPool()
        self._since[split] = []
        self._making[split] = (pool, self._submit(_make, Seeded(pool, pool.create(), 0), texts))

    def is_making(self, split: str) -> bool:
        """Whether an automaton is being made, or waits to be taken."""
        return split in self._making

    def take(self, split: str) -> Seeded | None:
        """The automaton that was being made; None while it is not finished, or if that failed.

        What has ended meanwhile is read, too, beside the engine like the rest.
        """
        pool, made = self._making[split]
        if not made.done():
            return None
        try:
            seeded = made.result()
            if since := self._since[split]:
                self._since[split] = []
                self._making[split] = (pool, self._submit(_make, seeded, since[::-1]))
                return None
        except Exception:
            del self._making[split]
            self._fail("Older texts of the run cannot be taken over")
            return None
        del self._making[split]
        return seeded

    def wait(self) -> None:
        """Wait until all work handed over is done."""
        made = [future for _, future in self._making.values()]
        futures: list[Future[Any]] = [*self._writing, *self._reading.values(), *made]
        for future in futures:
            future.exception()

    def _meet(self, split: str, step: int) -> None:
        self._met.add(split)
        if self._store is not None:
            self._reading[split] = self._submit(self._store.read, split, step, self._most_tokens)

    def _keep(self, split: str, text: Int32Array) -> None:
        text = text[-self._most_tokens :]
        self._kept.setdefault(split, deque()).append(text)
        self._tokens += len(text)
        if split in self._making:
            self._since[split].append(text)
        self._shorten(split)

    def _shorten(self, split: str) -> None:
        """Forget the oldest texts of a split until all fit."""
        kept = self._kept[split]
        while self._tokens > self._most_tokens and kept:
            self._tokens -= len(kept.popleft())

    def _write(self, live: _Live, text: Int32Array) -> None:
        for done in [future for future in self._writing if future.done()]:
            del self._writing[done]
            if done.exception() is not None:
                self._fail("Texts of the run cannot be written", done.exception())
        if self._store is None or self._off:
            return
        if sum(self._writing.values()) + text.nbytes <= _LARGEST_BACKLOG:
            written = self._submit(self._store.append, live.split, live.step, text)
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

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max(max_bytes, _LEAST_DISK_BYTES)
        self._opened: HistoryStore | None = None

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

            self._opened = HistoryStore(self._path, self._max_bytes, _MOST_READ)
        return self._opened
