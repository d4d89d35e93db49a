"""Automata that requests share: who belongs to which, and what is given up for want of memory."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, AutomatonFullError, Int32Array
from sam_rollout.identity import RequestIdentity
from sam_rollout.sources.contract import Limits, Usage
from sam_rollout.sources.support.live import NO_SLOT, LiveTexts, number_of

# No automaton that is half as large as can be takes less.
_LEAST_BYTES_OF_LARGE = LARGEST_AUTOMATON // 2 * 16

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass
class Group:
    """What shares an automaton."""

    automaton: int
    slots: dict[str, int] = dataclasses.field(default_factory=dict)  # of live requests
    is_over: bool = False  # freed with the last live request


class GroupedTexts(LiveTexts, Generic[Key]):
    """One automaton for each group of requests; `key_of` tells the groups apart.

    Args:
        limits: of the engine.
        max_bytes: memory of all automata, checked after every step. Beyond it whole groups are
            given up, the one that has been absent from the batch longest first, and so is a group
            that comes near the largest automaton there can be. Its requests do without until they
            end: reading a long text anew at once would hold up an engine step.
    """

    needs_identity = True

    def __init__(self, limits: Limits, max_bytes: int) -> None:
        super().__init__(limits)
        self._max_bytes = max_bytes
        self._groups: OrderedDict[Key, Group] = OrderedDict()  # longest absent first
        self._key_of: dict[str, Key] = {}  # of live requests
        self._given_up: set[Key] = set()
        self._without: set[str] = set()  # live requests that do without
        self._bound: list[str] = []

    def key_of(self, identity: RequestIdentity | None) -> Key | None:
        """What a request shares its automaton by, None if it shares none."""
        raise NotImplementedError

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Tell which request is in which row."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            self._slots[row] = self._slot_of(request_id, identity)
        self._bound = list(request_ids)

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """As `LiveTexts`; a group is given up that one step carries to the largest automaton."""
        while True:
            try:
                return self._read(token_ids, num_tokens, eligible)
            except AutomatonFullError as full:
                automata = {group.automaton: key for key, group in self._groups.items()}
                self._give_up(automata[full.automaton])

    def settle(self) -> None:
        """Give groups up until the rest fits into memory."""
        if self._nbytes > self._max_bytes:
            self._make_room()
        if self.pool.nbytes > _LEAST_BYTES_OF_LARGE:
            for key, group in list(self._groups.items()):
                if self.pool.places_of_automaton(group.automaton) > LARGEST_AUTOMATON // 2:
                    self._give_up(key)

    def _make_room(self) -> None:
        """All memory is more than there may be."""
        while self._nbytes > self._max_bytes and self._groups:
            self._give_up(next(iter(self._groups)))

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests ended: their texts stay for the others. Unknown ids are passed over."""
        for request_id in request_ids:
            self._without.discard(request_id)
            self._leave(request_id)

    def usage(self) -> Usage:
        """As `LiveTexts`, with all memory."""
        return super().usage()._replace(bytes=self._nbytes)

    @property
    def _nbytes(self) -> int:
        """All memory."""
        return self.pool.nbytes

    def _read(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """As `catch_up`, once; after an AutomatonFullError it is called again."""
        super().catch_up(token_ids, num_tokens, eligible)

    def _slot_of(self, request_id: str, identity: RequestIdentity | None) -> int:
        """The slot of a request that is in the batch."""
        if (key := self._key_of.get(request_id)) is None:
            key = self.key_of(identity)
            if key in self._given_up:
                self._without.add(request_id)
            if key is None or request_id in self._without:
                return NO_SLOT
            if key not in self._groups:
                self._begin(key)
            self._key_of[request_id] = key
            group = self._groups[key]
            number = 0 if identity is None else number_of(identity.group_key)
            group.slots[request_id] = self.pool.open(group.automaton, number)
        self._groups.move_to_end(key)
        return self._groups[key].slots[request_id]

    def _begin(self, key: Key) -> None:
        """A group's first request has come."""
        self._groups[key] = Group(self.pool.create())

    def _leave(self, request_id: str) -> None:
        """A request has no part in its group any more, if it has one; its text stays."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return
        group = self._groups[key]
        self.pool.close(group.slots.pop(request_id))
        if group.is_over and not group.slots:
            self._free(key)

    def _end(self, key: Key) -> None:
        """Free a group, one with live requests when these have left."""
        group = self._groups[key]
        group.is_over = True
        if not group.slots:
            self._free(key)

    def _give_up(self, key: Key) -> None:
        for request_id in self._groups[key].slots:
            self._key_of.pop(request_id)
            self._without.add(request_id)
            if request_id in self._bound:
                self._slots[self._bound.index(request_id)] = NO_SLOT
        self._free(key)
        self._given_up.add(key)
        self.evictions += 1

    def _free(self, key: Key) -> None:
        group = self._groups.pop(key)
        for slot in group.slots.values():
            self.pool.close(slot)
        self.pool.destroy(group.automaton)
