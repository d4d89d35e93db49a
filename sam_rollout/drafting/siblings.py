"""The source `siblings`: the responses to one prompt draft from each other.

All responses to a prompt, running or finished, share one automaton while the training step lasts.
They grow in turns, so a row finds what its siblings wrote one engine step ago. The prompt is read
once for all of them. With the scope `run` all responses that the engine samples share one, step
after step, until it grows too large: prompts of one task are solved with the same phrases.
"""

import dataclasses
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from sam_rollout.automaton.pool import LARGEST_AUTOMATON
from sam_rollout.config import SiblingsSourceConfig
from sam_rollout.drafting.live import NO_SLOT, LiveTexts
from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity

# No automaton that is half as large as can be takes less.
_LEAST_BYTES_OF_LARGE = LARGEST_AUTOMATON // 2 * 16

_GroupKey = tuple[str, int, str]  # split, step, group


@dataclasses.dataclass
class _Group:
    automaton: int
    slots: dict[str, int] = dataclasses.field(default_factory=dict)  # of live requests
    step_is_over: bool = False


class SiblingTexts(LiveTexts):
    """One automaton per prompt, kept until its training step is over and its requests have ended.

    Args:
        max_rows: most requests in one batch.
        config: `scope`, and `max_bytes`, the memory of all automata, checked after every step.
            Beyond it whole groups are given up, the one that has been absent from the batch
            longest first; the requests of a group that was given up do without until the training
            step is over. A group that comes near the largest automaton there can be is given up,
            too. What all responses of a run share begins anew after a step that leaves it at half
            of either limit.
        max_branches: as for `LiveTexts`.
    """

    name = "siblings"
    bias = 0

    def __init__(self, max_rows: int, config: SiblingsSourceConfig, max_branches: int = 0) -> None:
        super().__init__(max_rows, max_branches)
        self._max_bytes = config.max_bytes
        self._of_run = config.scope == "run"
        self._groups: OrderedDict[_GroupKey, _Group] = OrderedDict()  # longest absent first
        self._key_of: dict[str, _GroupKey] = {}  # of live requests
        self._given_up: set[_GroupKey] = set()
        self._bound: list[str] = []

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Tell which request is in which row; one without identity shares with the run only."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            self._slots[row] = self._slot_of(request_id, identity)
        self._bound = list(request_ids)

    def settle(self) -> None:
        """Give groups up until the rest fits into memory."""
        while self.pool.nbytes > self._max_bytes and self._groups:
            self._give_up(next(iter(self._groups)))
        if self.pool.nbytes > _LEAST_BYTES_OF_LARGE:
            for key, group in list(self._groups.items()):
                if self.pool.places_of_automaton(group.automaton) > LARGEST_AUTOMATON // 2:
                    self._give_up(key)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests ended: their texts stay for their siblings. Unknown ids are passed over."""
        for request_id in request_ids:
            key = self._key_of.pop(request_id, None)
            if key is None:
                continue
            group = self._groups[key]
            self.pool.close(group.slots.pop(request_id))
            if group.step_is_over and not group.slots:
                self._free(key)

    def end_step(self) -> None:
        """The training step is over: free groups, those with live requests when these end."""
        if self._of_run:
            for key in [key for key in self._groups if self._is_half_full(key)]:
                self._give_up(key)
            self._given_up.clear()
            return
        self._given_up.clear()
        for key, group in list(self._groups.items()):
            group.step_is_over = True
            if not group.slots:
                self._free(key)

    def counters(self) -> Mapping[str, int]:
        """Groups and bytes as they stand, evictions since the start."""
        return {
            "siblings_groups": len(self._groups),
            "siblings_bytes": self.pool.nbytes,
            "siblings_evictions": self.evictions,
        }

    def _slot_of(self, request_id: str, identity: RequestIdentity | None) -> int:
        """The slot of a request that is in the batch."""
        if (key := self._key_of.get(request_id)) is None:
            key = self._group_of(identity)
            if key is None or key in self._given_up:
                return NO_SLOT
            if key not in self._groups:
                self._groups[key] = _Group(self.pool.create())
            self._key_of[request_id] = key
            group = self._groups[key]
            group.slots[request_id] = self.pool.open(group.automaton)
        self._groups.move_to_end(key)
        return self._groups[key].slots[request_id]

    def _group_of(self, identity: RequestIdentity | None) -> _GroupKey | None:
        """What a request shares its automaton by, None if it shares none."""
        if self._of_run:
            return (TRAIN_SPLIT if identity is None else identity.split, 0, "")
        return None if identity is None else (identity.split, identity.step, identity.group)

    def _is_half_full(self, key: _GroupKey) -> bool:
        automaton = self._groups[key].automaton
        return (
            self.pool.places_of_automaton(automaton) > LARGEST_AUTOMATON // 4
            or self.pool.nbytes_of_automaton(automaton) > self._max_bytes // 2
        )

    def _give_up(self, key: _GroupKey) -> None:
        for request_id in self._groups[key].slots:
            self._key_of.pop(request_id)
            if request_id in self._bound:
                self._slots[self._bound.index(request_id)] = NO_SLOT
        self._free(key)
        self._given_up.add(key)
        self.evictions += 1

    def _free(self, key: _GroupKey) -> None:
        group = self._groups.pop(key)
        for slot in group.slots.values():
            self.pool.close(slot)
        self.pool.destroy(group.automaton)
