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
        "first. Then running requests with the shortest texts lose theirs, and draft nothing more "
        "from this source.",
    )


class OwnText(LiveTexts):
    """Keeps one automaton per request, while the request lives and memory lasts.

    A preempted request keeps its automaton. At most `2 * max_rows + 16` automata are kept. Beyond
    that number, the request that has been absent from the batch longest loses its automaton. After
    every step, automata are given up until memory is below `config.max_bytes`. Requests that are
    absent from the batch lose their automata first, in the order in which they left. Requests in
    the batch follow, with the smallest automata first, because long texts yield the longest drafts.
    A request that was in the batch gets no new automaton, even if memory is free again.
    """

    def __init__(self, config: OwnSourceConfig, limits: Limits) -> None:
        super().__init__(limits)
        self._max_live = 2 * limits.max_rows + 16
        self._max_bytes = config.max_bytes
        self._slot_of: dict[str, int] = {}  # the request that has been absent longest is first
        self._without: set[str] = set()  # requests whose automata were given up in the batch
        self._bound: list[str] = []

    def bind(self, request_ids: Sequence[str], identities: Identities) -> None:
        """Learn which request is in which row."""
        self._bound = list(request_ids)
        for row, request_id in enumerate(self._bound):
            if request_id in self._without:
                self._slots[row] = NO_SLOT
                continue
            slot = self._slot_of.pop(request_id, NO_SLOT)
            slot = self.pool.open() if slot == NO_SLOT else slot
            self._slot_of[request_id] = slot  # moved to the end, after all absent requests
            self._slots[row] = slot
        while len(self._slot_of) > self._max_live:
            self._evict(next(iter(self._slot_of)))

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended; unknown ids are skipped."""
        for request_id in request_ids:
            self._without.discard(request_id)
            slot = self._slot_of.pop(request_id, NO_SLOT)
            if slot != NO_SLOT:
                self.pool.close(slot)

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
            self._evict(request_id)
            if request_id in row_of:
                # A new automaton would push out another one, so the request gets none.
                self._without.add(request_id)
                self._slots[row_of[request_id]] = NO_SLOT
            if self.pool.nbytes <= self._max_bytes:
                return

    def _evict(self, request_id: str) -> None:
        self.pool.close(self._slot_of.pop(request_id))
        self.evictions += 1


SOURCE = SourceEntry(
    "own", OwnSourceConfig, lambda config, limits, _responses: OwnText(config, limits), order=0
)
