"""What an engine's requests write: recorded while they run, kept on disk when they have ended.

One recorder and one folder serve all sources. Responses of training steps go to the folder, those
of validation do not: they would take the place of what training drafts from. Later steps, later
epochs and a run that is resumed read them there (`text_store.py`).

The disk is left to a thread of its own: no engine step waits for it. Where it fails, nothing is
read or written any more, and drafting goes on with what the engine samples.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.core.limits import Limits
from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.support.seeds import Seed, empty_seed, read_texts
from sam_rollout.sources.support.text_store import TextStore

if TYPE_CHECKING:
    from sam_rollout.automaton.recorder import TextRecorder

logger = logging.getLogger(__name__)

# Responses that wait for the disk; more are dropped, so that a slow disk cannot eat the memory.
MOST_WAITING_BYTES = 256 << 20

_NO_SLOT = -1
_NOTHING = np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class TextsConfig(Section):
    """Settings of the folder of ended responses, from which later steps and runs draft."""

    PATH: ClassVar[str] = "sam.texts"

    path: str = setting(
        "",
        allowed="a folder",
        meaning="Where ended responses are kept for the sources `prompt` and `run`, 4 bytes per "
        "token; empty: `sam/texts` in the run folder. In plain vLLM an empty path keeps none. "
        "Engines may share a folder, and a run may begin with that of another one.",
    )
    max_bytes: int = setting(
        8_000_000_000,
        minimum=64 << 20,
        meaning="Size of that folder. The oldest responses are deleted first. Each engine writes a "
        "segment of its own, a 256th of this; at most 255 share a folder, and of a response that "
        "is longer than a segment the end is kept.",
    )
    max_responses_per_prompt: int = setting(
        16,
        minimum=1,
        meaning="Responses of earlier steps drafted from, the newest ones.",
    )


class Ended(NamedTuple):
    """A response, with the end of its prompt."""

    identity: RequestIdentity
    text: Int32Array


class Responses:
    """Records a batch's responses, and keeps those that ended.

    Args:
        limits: of the engine.
        config: of the folder.
        executor: where slow work is done, one task after the other; by default a thread of its own.

    Attributes:
        ended: what the last call of `finish` ended, by request.
        failures: errors survived by leaving the disk alone; at most one.
        dropped: responses that were not kept, because the disk was too slow.
        heard: responses of other engines that were kept.
    """

    def __init__(
        self, limits: Limits, config: TextsConfig | None = None, executor: Executor | None = None
    ) -> None:
        self._limits = limits
        self._recorder = self._new_recorder()
        self._executor = executor or ThreadPoolExecutor(1, "sam-texts")
        config = config or TextsConfig()
        self._store: TextStore | None = None
        if config.path:
            folder, most = Path(config.path).expanduser(), config.max_responses_per_prompt
            self._store = TextStore(folder, config.max_bytes, most, limits.vocab_size)
        self._live: dict[str, tuple[RequestIdentity, int]] = {}  # with the recorder's slot
        self._slots = np.full(limits.max_rows, _NO_SLOT, np.int32)  # of the bound requests
        # On their way to the disk, each with its bytes; done in this order.
        self._waiting: deque[tuple[Future[Any], int]] = deque()
        self._waiting_bytes = 0
        self._is_wanted = self._off = False
        self.ended: dict[str, Ended] = {}
        self.failures = self.dropped = self.heard = 0

    @property
    def keeps(self) -> bool:
        """Whether ended responses go to a folder."""
        return self._store is not None and self._is_wanted and not self._off

    @property
    def nbytes(self) -> int:
        """Memory of what requests write, and of what waits for the disk."""
        return self._recorder.nbytes + self._waiting_bytes

    @property
    def refused(self) -> int:
        """Texts on disk that cannot be drafted from."""
        return 0 if self._store is None else self._store.refused

    def want(self) -> None:
        """A source reads what has ended: it is kept from now on."""
        self._is_wanted = True

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Learn which request is in which row, as `Source.bind`."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            if request_id not in self._live and identity is not None:
                self._live[request_id] = (identity, self._recorder.open())
            _, self._slots[row] = self._live.get(request_id, (None, _NO_SLOT))

    def record(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Copy what is new in each row of the batch that is bound; as `Source.catch_up`."""
        self._recorder.record(self._slots[: len(num_tokens)], token_ids, num_tokens, eligible)

    def live(self) -> Iterator[tuple[str, RequestIdentity]]:
        """All requests that have not ended, and who they are."""
        return ((request_id, identity) for request_id, (identity, _) in self._live.items())

    def peek(self, request_id: str, start: int) -> Int32Array:
        """Return what a live request wrote, from token `start` on."""
        _, slot = self._live.get(request_id, (None, _NO_SLOT))
        return _NOTHING if slot == _NO_SLOT else self._recorder.peek(slot, start)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests ended: `ended` tells what they wrote, and the folder keeps training's."""
        self.ended = {}
        for request_id in request_ids:
            identity, slot = self._live.pop(request_id, (None, _NO_SLOT))
            if identity is None or slot == _NO_SLOT:
                continue
            self._slots[self._slots == slot] = _NO_SLOT
            text = self._recorder.take(slot)
            if len(text):
                self.ended[request_id] = Ended(identity, text)
                if is_of_training(identity):
                    self._keep(identity.group, identity.step, text)

    def end_step(self) -> None:
        """A training step is over: give the memory of what was recorded back, if none goes on."""
        if not self._live:
            self._recorder = self._new_recorder()

    def hear(self, group: str, step: int, text: Int32Array) -> None:
        """Keep a response that ended beside another folder."""
        self.heard += self._keep(group, step, text)

    def read_earlier(self, group: str, step: int, max_tokens: int) -> Future[Seed | None]:
        """Begin to make an automaton of a prompt's responses before a step; None where none are."""
        return self._submit(0, _read_earlier, self._store, group, step, max_tokens)

    def read_newest(self, step: int, max_tokens: int) -> Future[list[Int32Array]]:
        """Begin to read the newest responses before a step, to any prompt."""
        return self._submit(0, TextStore.read, self._store, None, step, max_tokens)

    def wait(self) -> None:
        """Wait until all work handed over is done."""
        futures.wait([future for future, _ in self._waiting])
        self.settle()

    def settle(self) -> None:
        """Notice what has been written; a disk that hangs is not asked for each text anew."""
        while self._waiting and self._waiting[0][0].done():
            future, nbytes = self._waiting.popleft()
            self._waiting_bytes -= nbytes
            # What was read is for those who asked; so are its errors.
            if nbytes and (error := future.exception()) is not None:
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Leave the disk alone from now on, and say so once."""
        if self._off:
            return
        logger.warning(
            "The responses kept in %s cannot be read or written any more; the rollout continues "
            "without.",
            self._store and self._store.folder,
            exc_info=error,
        )
        self.failures += 1
        self._off = True
        self._waiting.clear()
        self._waiting_bytes = 0

    def _new_recorder(self) -> TextRecorder:
        from sam_rollout.automaton.recorder import TextRecorder  # compiles

        # Of requests that are preempted, too; beyond that, responses are not recorded.
        return TextRecorder(2 * self._limits.max_rows + 16, self._limits.max_model_len)

    def _keep(self, group: str, step: int, text: Int32Array) -> bool:
        if self._store is None or not self.keeps:
            return False
        if self._waiting_bytes + text.nbytes > MOST_WAITING_BYTES:
            self.dropped += 1
            return False
        self._submit(text.nbytes, self._store.append, group, step, text)
        return True

    def _submit(self, nbytes: int, task: Callable[..., Any], *arguments: object) -> Future[Any]:
        future = submit(self._executor, task, *arguments)
        self._waiting.append((future, nbytes))
        self._waiting_bytes += nbytes
        return future


def submit(executor: Executor, task: Callable[..., Any], *arguments: object) -> Future[Any]:
    """Have a task done; one for which there is no thread has failed."""
    try:
        return executor.submit(task, *arguments)
    except RuntimeError as error:
        failed: Future[Any] = Future()
        failed.set_exception(error)
        return failed


def _read_earlier(store: TextStore, group: str, step: int, max_tokens: int) -> Seed | None:
    """See `Responses.read_earlier`."""
    texts = store.read(group, step, max_tokens)
    return read_texts(empty_seed(), texts) if texts else None


def is_of_training(identity: RequestIdentity | None) -> bool:
    """Whether a request belongs to a training step: an engine's warm-up, say, does not."""
    return identity is not None and identity.split == TRAIN_SPLIT and identity.step >= 0
