"""Keeps an automaton for each group of requests: begins, replaces and gives up groups."""

import dataclasses
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from sam_rollout.automaton.interface import AutomatonFullError, Int32Array, Int64Array
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.sources.contract import Identities, Limits, Usage
from sam_rollout.sources.support.live_texts import NO_SLOT, LiveTexts, number_of
from sam_rollout.sources.support.responses import Responses
from sam_rollout.sources.support.text_moves import MovingTexts

Key = TypeVar("Key", bound=Hashable)


@dataclasses.dataclass(eq=False)
class Group(Generic[Key]):
    """Requests that share an automaton."""

    key: Key  # what all requests of the group have in common
    automaton: int  # number in the pool
    slots: dict[str, int] = dataclasses.field(default_factory=dict)  # live request -> slot
    is_over: bool = False  # whether the group is freed when its last live request leaves
    seeded_tokens: int = 0  # tokens of ended texts that the automaton began with
    due_at: int = 0  # bytes below which the automaton need not be replaced


class GroupedTexts(LiveTexts, Generic[Key]):
    """Keeps one automaton for each group of requests; `key_of` names a request's group.

    A new group may replace a group, and live requests then move to the new one (`text_moves.py`).
    If an automaton has reached the largest possible size, its group is given up. The group's
    requests then draft nothing from this source until they end, because reading a long text again
    would delay a step. Groups are also given up after a step, if memory exceeds `max_bytes`:
    first the replaced groups, then the groups that have been absent from the batch longest.
    """

    needs_identity = True

    def __init__(self, limits: Limits, max_bytes: int, responses: Responses) -> None:
        super().__init__(limits)
        self._max_bytes = max_bytes
        self._responses = responses
        self._groups: OrderedDict[Key, Group[Key]] = OrderedDict()  # longest absent first
        self._replaced: list[Group[Key]] = []  # groups whose live requests still have to move
        self._group_of: dict[str, Group[Key]] = {}  # live request -> its group
        self._given_up: set[Key] = set()
        self._without: set[str] = set()  # live requests that have lost their group
        self._bound: list[str] = []
        self._moving = MovingTexts(self.pool)

    def key_of(self, identity: RequestIdentity | None) -> Key | None:
        """Return the key of a request's group, None if the request has no group."""
        raise NotImplementedError

    def bind(self, request_ids: Sequence[str], identities: Identities) -> None:
        """Learn which request is in which row."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            self._slots[row] = self._slot_of(request_id, identity)
        self._bound = list(request_ids)

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Let automata read the rows' new tokens; give up each group whose automaton is full."""
        while True:
            try:
                self._arrive(self._moving.read(self._bound, token_ids, num_tokens, eligible))
                super().catch_up(token_ids, num_tokens, eligible)
                return self._read_others()
            except AutomatonFullError as full:
                (group,) = (one for one in self._all() if one.automaton == full.automaton)
                self._give_up(group)

    def _read_others(self) -> None:
        """Let automata read texts of other engines; called after automata have read the rows."""

    def settle(self) -> None:
        """Give up groups until the rest fits into memory."""
        if self._nbytes > self._max_bytes:
            self._make_room()

    def _make_room(self) -> None:
        """Give up groups in order until the rest fits; called when memory exceeds its limit."""
        for group in list(self._all()):
            if self._nbytes <= self._max_bytes:
                return
            self._give_up(group)

    def finish(self, request_ids: Collection[str]) -> None:
        """Free the state of requests that ended; their texts stay in the automata."""
        for request_id in request_ids:
            ended = self._responses.ended.get(request_id)
            self._moving.finish(request_id, None if ended is None else ended.text)
            self._without.discard(request_id)
            self._leave(request_id)

    def usage(self) -> Usage:
        """Report the pool's figures; `bytes` is all memory, and a moving request counts once."""
        return super().usage()._replace(live_requests=len(self._group_of), bytes=self._nbytes)

    @property
    def _nbytes(self) -> int:
        return self.pool.nbytes

    def _live_tokens(self, group: Group[Key]) -> Int64Array:
        return np.array([self.pool.length(slot) for slot in group.slots.values()], np.int64)

    def _all(self) -> Iterator[Group[Key]]:
        """Yield all groups in the order in which they are given up."""
        yield from self._replaced
        yield from self._groups.values()

    def _arrive(self, moved: list[tuple[int, int, int]]) -> None:
        """Switch requests to new automata; `moved` has a row, slot and automaton per request."""
        groups = {group.automaton: group for group in self._all()} if moved else {}
        for row, slot, automaton in moved:
            request_id, group = self._bound[row], groups[automaton]
            self._leave(request_id)
            self._without.discard(request_id)
            self._join(request_id, group, slot)
            self._slots[row] = slot

    def _slot_of(self, request_id: str, identity: RequestIdentity | None) -> int:
        group = self._group_of.get(request_id)
        if group is None:
            key = self.key_of(identity)
            if key in self._given_up:
                self._without.add(request_id)
            if key is None or request_id in self._without:
                return NO_SLOT
            group = self._groups.get(key) or self._begin(key, identity)
            number = 0 if identity is None else number_of(identity.group_key)
            self._join(request_id, group, self.pool.open(group.automaton, number))
        if group not in self._replaced:
            self._groups.move_to_end(group.key)
        return group.slots[request_id]

    def _join(self, request_id: str, group: Group[Key], slot: int) -> None:
        self._group_of[request_id] = group
        group.slots[request_id] = slot

    def _begin(self, key: Key, identity: RequestIdentity | None) -> Group[Key]:
        self._groups[key] = Group(key, self.pool.create())
        return self._groups[key]

    def _succeed(self, group: Group[Key], automaton: int, seeded_tokens: int = 0) -> None:
        """Replace a group's automaton; its live requests begin to move to the new automaton."""
        self._groups[group.key] = Group(group.key, automaton, seeded_tokens=seeded_tokens)
        self._moving.begin(group.slots, automaton)
        self._replaced.append(group)
        self._end(group)

    def _leave(self, request_id: str) -> None:
        """Take a request out of its group, if it has one; the text stays in the automaton."""
        group = self._group_of.pop(request_id, None)
        if group is None:
            return
        self.pool.close(group.slots.pop(request_id))
        if group.is_over and not group.slots:
            self._free(group)

    def _end(self, group: Group[Key]) -> None:
        """Free a group, or mark it to be freed when its last live request has left."""
        group.is_over = True
        if not group.slots:
            self._free(group)

    def _give_up(self, group: Group[Key]) -> None:
        """Free a group at once; its live requests get no more votes from this source."""
        for request_id in group.slots:
            self._group_of.pop(request_id)
            self._without.add(request_id)
            if request_id in self._bound:
                self._slots[self._bound.index(request_id)] = NO_SLOT
        if group not in self._replaced:
            self._given_up.add(group.key)
        self._free(group)
        self.evictions += 1

    def _free(self, group: Group[Key]) -> None:
        if group in self._replaced:
            self._replaced.remove(group)
        else:
            del self._groups[group.key]
        self._moving.drop_all_to(group.automaton)
        for slot in group.slots.values():
            self.pool.close(slot)
        group.slots.clear()
        self.pool.destroy(group.automaton)
