"""Records an engine's responses: in memory while they are sampled, on disk after they have ended.

One recorder and one folder serve all sources (`text_store.py`). Only responses of training steps
are written to the folder, at the latest at the end of each step. A separate thread does all disk
work. After a disk error, the folder is not used any more, and drafting goes on with the texts in
memory.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import TRAIN_SPLIT, GroupKey, RequestIdentity
from sam_rollout.core.limits import Limits
from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.support.text_store import Text, TextStore

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool
    from sam_rollout.automaton.recorder import TextRecorder

logger = logging.getLogger(__name__)

# Maximum size of the responses that wait for a slow disk; further responses are dropped.
MOST_WAITING_BYTES = 256 << 20

_NO_SLOT = -1


@dataclasses.dataclass(frozen=True)
class TextsConfig(Section):
    """Settings of the folder of ended responses, from which later steps and runs draft."""

    PATH: ClassVar[str] = "sam.texts"

    path: str = setting(
        "",
        allowed="a folder",
        meaning="Folder that keeps ended responses for the sources `prompt` and `run`, 4 bytes per "
        "token ([rules](#earlier-steps-and-resumed-runs)). An empty path means `sam/texts` in the "
        "run folder; plain vLLM then keeps no responses.",
    )
    max_bytes: int = setting(
        8_000_000_000,
        minimum=64 << 20,
        meaning="Size of that folder. The oldest responses are deleted first. A response that is "
        "larger than a 256th of this size loses its beginning.",
    )
    max_responses_per_prompt: int = setting(
        16,
        minimum=1,
        meaning="The number of a prompt's newest responses of earlier steps to draft from.",
    )


class Ended(NamedTuple):
    """An ended response; `text` begins with the end of the prompt."""

    identity: RequestIdentity
    text: Int32Array


class Responses:
    """Records the responses of a batch, and keeps them after they have ended."""

    def __init__(self, limits: Limits, config: TextsConfig) -> None:
        self._limits = limits
        self._recorder = self._new_recorder()
        self._executor = ThreadPoolExecutor(1, "sam-texts")
        self._store: TextStore | None = None
        if config.path:
            folder, most = Path(config.path).expanduser(), config.max_responses_per_prompt
            self._store = TextStore(folder, config.max_bytes, most, limits.vocab_size)
        self._live: dict[str, tuple[RequestIdentity, int]] = {}  # identity, slot in the recorder
        self._slots = np.full(limits.max_rows, _NO_SLOT, np.int32)  # slots by row, [max_rows]
        # Disk tasks in order, each with the number of bytes that it writes, 0 for reading tasks.
        self._waiting: deque[tuple[Future[Any], int]] = deque()
        self._unwritten: list[Text] = []  # responses for the next file
        self._unwritten_bytes = 0
        self._waiting_bytes = 0  # bytes of `_unwritten` and `_waiting` together
        self._is_wanted = self._is_behind = False
        self.ended: dict[str, Ended] = {}  # request that the last `finish` ended -> its text
        # Key of an interrupted response -> its group. A request of a later step continues the
        # response. That request has the whole text, so the interrupted part is not kept.
        self.interrupted: Mapping[int, GroupKey] = {}
        self.failures = 0  # number of disk errors: 0 or 1, because an error ends the disk's use

    @property
    def keeps(self) -> bool:
        """Whether ended responses are written to a folder."""
        return self._store is not None and self._is_wanted and not self.failures

    @property
    def nbytes(self) -> int:
        """Bytes of live responses, of responses that wait for the disk, and of the disk's index."""
        index = 0 if self._store is None else self._store.nbytes
        return self._recorder.nbytes + self._waiting_bytes + index

    @property
    def refused(self) -> int:
        """The number of texts on disk that cannot be drafted from."""
        return 0 if self._store is None else self._store.refused

    def want(self) -> None:
        """Keep ended responses from now on, because a source reads them."""
        self._is_wanted = True

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Learn which request is in which row; see `Source.bind` for the arguments."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            if request_id not in self._live and identity is not None:
                slot = self._recorder.open(identity.prompt_tokens)
                if slot != _NO_SLOT:
                    self._live[request_id] = (identity, slot)
            _, self._slots[row] = self._live.get(request_id, (None, _NO_SLOT))

    def record(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Copy each bound row's new tokens; see `Source.catch_up` for the arguments."""
        self._recorder.record(self._slots[: len(num_tokens)], token_ids, num_tokens, eligible)

    def live(self) -> Iterator[tuple[str, RequestIdentity]]:
        """Return all live requests with their identities."""
        return ((request_id, identity) for request_id, (identity, _) in self._live.items())

    def peek(self, request_id: str, start: int) -> Int32Array:
        """Return the tokens of a live request's text from index `start` on, int32[n]."""
        return self._recorder.peek(self._live[request_id][1], start)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Move the texts of ended requests to `ended`, and store texts of training on disk."""
        self.ended = {}
        for request_id in request_ids:
            identity, slot = self._live.pop(request_id, (None, _NO_SLOT))
            if identity is None:
                continue
            self._slots[self._slots == slot] = _NO_SLOT
            text = self._recorder.take(slot)
            if len(text) and identity.key not in self.interrupted:
                self.ended[request_id] = Ended(identity, text)
                if is_of_training(identity):
                    self._keep(identity.group, identity.step, text)

    def end_step(self) -> None:
        """Write the training step's responses; free the recorder's memory if no request is live."""
        self._write()
        if not self._live:
            self._recorder = self._new_recorder()

    def read_earlier(self, group: str, step: int, max_tokens: int) -> Future[AutomatonPool | None]:
        """Begin to make an automaton of a prompt's newest responses from steps before `step`."""
        return self._submit(0, _read_earlier, self._store, group, step, max_tokens)

    def read_newest(self, step: int, max_tokens: int) -> Future[list[Int32Array]]:
        """Begin to read the newest responses to all prompts from steps before `step`."""
        return self._submit(0, TextStore.read, self._store, None, step, max_tokens)

    def wait(self) -> None:
        """Wait until all disk tasks are done."""
        futures.wait([future for future, _ in self._waiting])
        self.settle()

    def settle(self) -> None:
        """Remove finished disk tasks; stop using the disk if a write failed."""
        while self._waiting and self._waiting[0][0].done():
            future, nbytes = self._waiting.popleft()
            self._waiting_bytes -= nbytes
            # If a read failed, nothing is done here, because the reader's future raises the error.
            if nbytes and (error := future.exception()) is not None:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Stop using the disk, and log a warning once."""
        if self.failures:
            return
        logger.warning(
            "The responses kept in %s cannot be read or written any more; the rollout continues "
            "without them.",
            self._store and self._store.folder,
            exc_info=error,
        )
        self.failures += 1
        self._waiting.clear()
        self._unwritten = []
        self._unwritten_bytes = self._waiting_bytes = 0

    def _new_recorder(self) -> TextRecorder:
        from sam_rollout.automaton.recorder import TextRecorder  # this import is slow

        # Preempted requests need slots, too. If no slot is free, a response is not recorded.
        return TextRecorder(2 * self._limits.max_rows + 16, self._limits.max_model_len)

    def _keep(self, group: str, step: int, text: Int32Array) -> None:
        """Keep a response of training until the thread writes it to disk."""
        if self._store is None or not self.keeps:
            return
        if self._waiting_bytes + text.nbytes > MOST_WAITING_BYTES:
            if not self._is_behind:
                logger.warning(
                    "Responses end faster than they can be written to %s. Responses that find no "
                    "room among those waiting are not kept; drafting goes on.",
                    self._store.folder,
                )
            self._is_behind = True
            return
        self._unwritten.append(Text(group, step, text))
        self._unwritten_bytes += text.nbytes
        self._waiting_bytes += text.nbytes
        if self._unwritten_bytes >= min(self._store.largest_text, MOST_WAITING_BYTES // 8):
            self._write()

    def _write(self) -> None:
        if self._store is not None and self._unwritten:
            self._submit(self._unwritten_bytes, self._store.write, self._unwritten)
            self._unwritten, self._unwritten_bytes = [], 0

    def _submit(self, nbytes: int, task: Callable[..., Any], *arguments: object) -> Future[Any]:
        future = submit(self._executor, task, *arguments)
        self._waiting.append((future, nbytes))
        return future


def submit(executor: Executor, task: Callable[..., Any], *arguments: object) -> Future[Any]:
    """Submit a task; return a failed future if the executor cannot start its thread."""
    try:
        return executor.submit(task, *arguments)
    except RuntimeError as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _read_earlier(store: TextStore, group: str, step: int, max_tokens: int) -> AutomatonPool | None:
    texts = store.read(group, step, max_tokens)
    return read_texts(empty_pool(), texts) if texts else None


def empty_pool() -> AutomatonPool:
    """Make a pool without automata."""
    from sam_rollout.automaton.pool import AutomatonPool  # this import is slow

    return AutomatonPool()


def read_texts(pool: AutomatonPool, texts: Iterable[Int32Array]) -> AutomatonPool:
    """Let a new automaton in a pool read ended texts, mostly without the GIL; return the pool."""
    automaton, first = pool.create(), np.zeros(1, np.int32)
    for text in texts:
        slot = pool.open(automaton)
        pool.extend(np.array([slot], np.int32), first, text[None], np.array([len(text)], np.int32))
        pool.close(slot)
    return pool


def is_of_training(identity: RequestIdentity | None) -> bool:
    """Whether a request belongs to a training step; an engine's warm-up requests do not."""
    return identity is not None and identity.split == TRAIN_SPLIT and identity.step >= 0
