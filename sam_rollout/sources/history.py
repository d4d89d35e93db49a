"""The source `history`: what was sampled for the same prompt in earlier training steps.

Epochs repeat their prompts, and a policy changes slowly: responses of the last epoch share long
passages with today's. They are kept on disk (`history_store.py`) when they end; when the first
request of a group arrives, the group's past responses become a static automaton. What siblings
sample in the current step is not history: it is left to the source `siblings`.

Everything slow (the disk, building automata) happens in a thread of its own, most of it without the
GIL; a step only hands work over and takes results when they are there. Where the disk fails, the
source is switched off and the others go on.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.metric import Metric
from sam_rollout.settings import ConfigError, Section, setting
from sam_rollout.sources.contract import Limits, SourceEntry, Usage
from sam_rollout.sources.support.static import StaticTexts

if TYPE_CHECKING:
    from sam_rollout.automaton.static import StaticAutomaton
    from sam_rollout.sources.support.history_store import HistoryStore

logger = logging.getLogger(__name__)

# Of an automaton, for a first guess of its size: 4 for the text, the rest states and edges.
HISTORY_BYTES_PER_TOKEN = 36
DISK_BYTES_PER_TOKEN = 4
# Responses that wait for the disk; more are dropped, so that a slow disk cannot eat the memory.
_MAX_WAITING_BYTES = 256 << 20

_NO_SLOT = -1


@dataclasses.dataclass(frozen=True)
class HistorySourceConfig(Section):
    """Settings of the drafts from responses of earlier training steps."""

    PATH: ClassVar[str] = "sam.sources.history"

    enabled: bool = setting(
        True,
        meaning="Draft from responses to the same prompt in earlier training steps, and store "
        "those of this one. A run in which no prompt can come back does without, unless `path` "
        "is set ([defaults.md](defaults.md#history)); so does plain vLLM without a `path`.",
    )
    path: str = setting(
        "",
        allowed="a folder",
        meaning="Where responses are stored; empty: `sam/history` in the run folder.",
    )
    max_bytes: int = setting(
        8_000_000_000,
        minimum=64 << 20,
        meaning="Size of that folder, about 4 bytes per token. The oldest responses are deleted "
        "first. Each engine writes a segment of its own, a 256th of this, and so does a server "
        "that adds those of other folders; at most 255 share a folder, and a response that is "
        "longer than a segment is not stored.",
    )
    max_memory_bytes: int = setting(
        1_000_000_000,
        minimum=1 << 20,
        meaning="Memory of one engine, about 36 bytes per token. Groups without running "
        "requests lose their history first.",
    )
    max_responses_per_prompt: int = setting(
        16,
        minimum=1,
        meaning="Responses drafted from, the newest ones.",
    )
    share: bool = setting(
        True,
        meaning="Where engines do not all see the same folder: tell one engine's server of every "
        "other folder each response once it has ended, to be stored there, too. Every folder then "
        "holds the whole run, and `max_bytes` is about all of it. Nothing waits for it; with one "
        "folder nothing is sent. See [many nodes](multinode.md#history-of-other-nodes).",
    )


@dataclasses.dataclass
class _Live:
    """A live request."""

    identity: RequestIdentity | None
    row: int  # in the bound batch, -1 while absent
    slot: int  # where its text is recorded, -1 for nowhere


@dataclasses.dataclass
class _Group:
    """The past of a group, from its first request in a step until the step ends."""

    live: int = 0  # requests
    automaton: StaticAutomaton | None = None


_GroupKey = tuple[str, int]  # group, step


class HistorySource(StaticTexts):
    """Drafts from earlier responses to the same prompt.

    Requests without identity, outside training steps or of validation neither draft from history
    nor enter it.

    Args:
        config: with a path.
        limits: of the engine.
        executor: where slow work is done, one task after the other; by default a thread of its own.

    Raises:
        ConfigError: the path is not set.
    """

    name = "history"
    needs_identity = True

    def __init__(
        self, config: HistorySourceConfig, limits: Limits, executor: Executor | None = None
    ) -> None:
        if not config.path:
            raise ConfigError(f"{config.PATH}.path", config.path, "must name a folder")
        from sam_rollout.automaton import static_build
        from sam_rollout.automaton.recorder import TextRecorder

        super().__init__(limits)
        self._config = config
        self._executor = executor or ThreadPoolExecutor(1, "sam-history")
        static_build.warm_up()  # now, or the first group would wait for the compiler
        # Of requests that are preempted, too; beyond that, responses are not recorded.
        self._recorder = TextRecorder(2 * limits.max_rows + 16, limits.max_model_len)
        self._live: dict[str, _Live] = {}
        self._bound: list[_Live] = []
        self._slots = np.full(limits.max_rows, _NO_SLOT, np.int32)
        self._groups: OrderedDict[_GroupKey, _Group] = OrderedDict()  # longest unused first
        self._loading: dict[_GroupKey, Future] = {}  # the past that is being read
        self._nbytes = 0
        self._worker = _Worker(config, limits.vocab_size)
        self._waiting: dict[Future, int] = {}  # responses on their way to the disk -> bytes
        self._off = False
        self._counts = dict.fromkeys(
            ("failures", "dropped", "evictions", "groups_found", "groups_missing"), 0
        )

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `Source.bind`. A group's first request has its past read."""
        rows = [
            self._live.get(request_id) or self._admit(request_id, identity)
            for request_id, identity in zip(request_ids, identities, strict=True)
        ]
        self._matcher.rearrange(np.array([live.row for live in rows], np.int64))
        for live in self._bound:
            live.row = -1
        for row, live in enumerate(rows):
            live.row = row
            self._slots[row] = live.slot
            group = self._groups.get(_key_of(live.identity))
            automaton = None if group is None else group.automaton
            if self._matcher.automaton(row) is not automaton:
                self._matcher.attach(row, automaton)
        self._bound = rows

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """As `Source.catch_up`; cursors are left to the first `locate`."""
        if self._off:
            return
        self._recorder.record(self._slots[: len(num_tokens)], token_ids, num_tokens, eligible)
        self._take_results()

    def finish(self, request_ids: Iterable[str]) -> None:
        """As `Source.finish`; responses go to the disk."""
        for request_id in request_ids:
            live = self._live.pop(request_id, None)
            if live is None:
                continue
            if live.row >= 0:
                self._matcher.attach(live.row, None)
                self._slots[live.row] = _NO_SLOT
            if live.slot != _NO_SLOT and live.identity is not None:
                self._write(live.identity, self._recorder.take(live.slot))
            if (group := self._groups.get(_key_of(live.identity))) is not None:
                group.live -= 1

    def end_step(self) -> None:
        """Forget the groups that have no live request: another step sees more of their past."""
        for key in [key for key, group in self._groups.items() if group.live == 0]:
            self._forget(key)

    def counters(self) -> Mapping[str, int]:
        """What happened to groups and responses."""
        return {f"history_{name}": count for name, count in self._counts.items()}

    def usage(self) -> Usage:
        """Memory of what is drafted from, what requests write, and what waits for the disk."""
        waiting = sum(self._waiting.values())
        nbytes = self._nbytes + self._recorder.nbytes + waiting
        return Usage(refused_texts=self._worker.refused, bytes=nbytes)

    def levels(self) -> Mapping[str, int]:
        """Memory, and size of the folder."""
        return {"history_bytes": self._nbytes, "history_disk_bytes": self._worker.disk_bytes}

    def wait(self) -> None:
        """Wait until all work handed over is done; for tests, replays and the end of a run."""
        for future in [*self._waiting, *self._loading.values()]:
            future.exception()
        self._take_results()

    def _admit(self, request_id: str, identity: RequestIdentity | None) -> _Live:
        """Meet a new request."""
        live = _Live(identity, row=-1, slot=_NO_SLOT)
        self._live[request_id] = live
        if self._off or identity is None or identity.split != TRAIN_SPLIT or identity.step < 0:
            live.identity = None
            return live
        live.slot = self._recorder.open()
        self._counts["dropped"] += live.slot == _NO_SLOT
        key = _key_of(identity)
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group()
            self._loading[key] = self._submit(self._worker.load, *key)
        self._groups.move_to_end(key)
        group.live += 1
        return live

    def _write(self, identity: RequestIdentity, tokens: Int32Array) -> None:
        if self._off or len(tokens) == 0:
            return
        if sum(self._waiting.values()) + tokens.nbytes > _MAX_WAITING_BYTES:
            self._counts["dropped"] += 1
            return
        future = self._submit(self._worker.append, identity.group, identity.step, tokens)
        self._waiting[future] = tokens.nbytes

    def _submit(self, task: Callable, *arguments) -> Future:
        try:
            return self._executor.submit(task, *arguments)
        except RuntimeError as error:  # no thread to be had: the history ends, the drafter does not
            failed: Future = Future()
            failed.set_exception(error)
            return failed

    def _take_results(self) -> None:
        """Take over what has been written and built since the last call."""
        if not self._waiting and not self._loading:
            return
        try:
            for future in [future for future in self._waiting if future.done()]:
                del self._waiting[future]
                self._counts["dropped"] += not future.result()
            for key in [key for key, loading in self._loading.items() if loading.done()]:
                self._install(key, self._loading.pop(key).result())
        except Exception:
            self._switch_off()

    def _install(self, key: _GroupKey, automaton: StaticAutomaton | None) -> None:
        """Let the group's requests draft from the past that was read."""
        self._counts["groups_missing" if automaton is None else "groups_found"] += 1
        if automaton is None:
            return
        group = self._groups[key]
        group.automaton = automaton
        self._nbytes += automaton.nbytes
        self._respect_max_bytes()
        for row, live in enumerate(self._bound):
            if live.row == row and _key_of(live.identity) == key:
                self._matcher.attach(row, group.automaton)

    def _respect_max_bytes(self) -> None:
        """Give automata up until the rest fits: without live requests first, then longest ago."""
        by_use = sorted(self._groups.items(), key=lambda item: item[1].live > 0)
        for _, group in by_use:
            if self._nbytes <= self._config.max_memory_bytes:
                return
            self._counts["evictions"] += self._drop_automaton(group)

    def _drop_automaton(self, group: _Group) -> bool:
        """Free a group's automaton, if it has one; it is not read again while the group lives."""
        if group.automaton is None:
            return False
        for row in range(len(self._bound)):
            if self._matcher.automaton(row) is group.automaton:
                self._matcher.attach(row, None)
        self._nbytes -= group.automaton.nbytes
        group.automaton = None
        return True

    def _forget(self, key: _GroupKey) -> None:
        self._loading.pop(key, None)
        self._drop_automaton(self._groups.pop(key))

    def _switch_off(self) -> None:
        """Free everything; the other sources go on."""
        logger.warning(
            "The history in %s failed and is switched off; the rollout continues without it.",
            self._config.path,
            exc_info=True,
        )
        self._off = True
        self._counts["failures"] += 1
        self._waiting.clear()
        self._loading.clear()
        for key in list(self._groups):
            self._forget(key)


class _Worker:
    """The slow half, run by the executor: one task at a time, in order."""

    def __init__(self, config: HistorySourceConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._store: HistoryStore | None = None
        self._step = -1  # of the last refresh
        self.disk_bytes = 0

    @property
    def refused(self) -> int:
        """Responses on disk that cannot be drafted from."""
        return 0 if self._store is None else self._store.refused

    def load(self, group: str, step: int) -> StaticAutomaton | None:
        """The automaton of a group's responses before a step; None if there are none."""
        store = self._open()
        if step != self._step:  # responses of earlier steps are all there when a step begins
            store.refresh()
            self._step = step
            self.disk_bytes = store.disk_bytes()
        max_tokens = self._config.max_memory_bytes // HISTORY_BYTES_PER_TOKEN
        responses = store.read(group, step, max_tokens)
        if not responses:
            return None
        from sam_rollout.automaton.static import build, join

        return build(join(responses))

    def append(self, group: str, step: int, tokens: Int32Array) -> bool:
        """Write a response; False if it is too long."""
        return self._open().append(group, step, tokens)

    def _open(self) -> HistoryStore:
        """The store, opened by the first task: ranks whose drafts are unused never have one."""
        if self._store is None:
            from sam_rollout.sources.support.history_store import HistoryStore

            self._store = HistoryStore(
                Path(self._config.path).expanduser(),
                self._config.max_bytes,
                self._config.max_responses_per_prompt,
                self._vocab_size,
            )
        return self._store


def _key_of(identity: RequestIdentity | None) -> _GroupKey:
    return ("", -1) if identity is None else (identity.group, identity.step)


def _make(config: HistorySourceConfig, limits: Limits) -> HistorySource | None:
    """Without a run there is no folder to keep responses in, and no later step to serve."""
    return HistorySource(config, limits) if config.path else None


SOURCE = SourceEntry(
    "history",
    HistorySourceConfig,
    _make,
    order=20,
    metrics=(
        Metric(
            "history_unheard",
            "responses",
            "Responses that another folder lacks: its replica was gone, failed or was too slow, or "
            "they were malformed or too long.",
        ),
    ),
    benchmark=lambda folder: {"path": str(folder)},
)
