"""The source `own`: each request drafts from its own prompt and response."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.contract import Identities, Limits, SourceEntry
from sam_rollout.sources.support.live_texts import NO_SLOT, LiveTexts


@dataclass(frozen=True)
class OwnSourceConfig(Section):
    """Settings of the drafts from the request's own text."""

    PATH: ClassVar[str] = "sam.sources.own"

    enabled: bool = setting(
        True,
        meaning="Draft from the request's own prompt and response. With `sam.enabled` at "
        "least one source must be on.",
    )
    max_bytes: int = setting(
        2_000_000_000,
        minimum=1 << 20,
        meaning="Memory of one engine. If it is full, requests that do not run lose their automata "
        "first, then requests with the shortest texts.",
    )


class OwnText(LiveTexts):
    """Keeps one automaton per request, while the request lives and memory lasts.

    A preempted request keeps its automaton. At most `2 * max_rows + 16` automata are kept. Beyond
    that number, the request that has been absent from the batch longest loses its automaton. After
    every step, automata are given up until memory is below `config.max_bytes`. Requests that are
    absent from the batch lose their automata first, in the order in which they left. Requests in
    the batch follow, with the smallest automata first, because long texts yield the longest drafts.
    """

    name = "own"

    def __init__(self, config: OwnSourceConfig, limits: Limits) -> None:
        super().__init__(limits)
        self._max_live = 2 * limits.max_rows + 16
        self._max_bytes = config.max_bytes
        self._slot_of: dict[str, int] = {}  # the request that has been absent longest is first
        # Requests in the batch whose automata were given up -> sizes of these automata in bytes.
        self._suspended: dict[str, int] = {}
        self._bound: list[str] = []

    def bind(self, request_ids: Sequence[str], identities: Identities) -> None:
        """Learn which request is in which row."""
        ids = list(request_ids)
        self._resume(ids)
        for row, request_id in enumerate(ids):
            if request_id in self._suspended:
                self._slots[row] = NO_SLOT
                continue
            slot = self._slot_of.pop(request_id, NO_SLOT)
            slot = self.pool.open() if slot == NO_SLOT else slot
            self._slot_of[request_id] = slot  # moved to the end, after all absent requests
            self._slots[row] = slot
        self._bound = ids
        while len(self._slot_of) > self._max_live:
            self._evict(next(iter(self._slot_of)))

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended; unknown ids are skipped."""
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, NO_SLOT)
            if slot != NO_SLOT:
                self.pool.close(slot)
            else:
                self._suspended.pop(request_id, None)

    def _resume(self, ids: list[str]) -> None:
        """Resume suspended requests, in row order, if automata of their former sizes fit."""
        if not self._suspended:
            return
        nbytes = self.pool.nbytes
        suspended = {}
        for request_id in ids:
            had = self._suspended.get(request_id)
            if had is None:
                continue
            if nbytes + had <= self._max_bytes:
                nbytes += had
            else:
                suspended[request_id] = had
        self._suspended = suspended

    def settle(self) -> None:
        """Give up automata until the rest fits, in the order that the class describes."""
        if self.pool.nbytes <= self._max_bytes:
            return
        row_of = {request_id: row for row, request_id in enumerate(self._bound)}
        absent = [request_id for request_id in self._slot_of if request_id not in row_of]
        by_size = sorted(
            (self.pool.nbytes_of(slot), request_id)
            for request_id, slot in self._slot_of.items()
            if request_id in row_of
        )
        for request_id in absent + [request_id for _, request_id in by_size]:
            nbytes = self._evict(request_id)
            if request_id in row_of:
                # A new automaton would push out another one, so the request gets none for now.
                self._suspended[request_id] = nbytes
                self._slots[row_of[request_id]] = NO_SLOT
            if self.pool.nbytes <= self._max_bytes:
                return

    def _evict(self, request_id: str) -> int:
        slot = self._slot_of.pop(request_id)
        nbytes = self.pool.nbytes_of(slot)
        self.pool.close(slot)
        self.evictions += 1
        return nbytes


SOURCE = SourceEntry(
    "own", OwnSourceConfig, lambda config, limits, _responses: OwnText(config, limits), order=0
)
