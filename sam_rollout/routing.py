"""Which engine replica a response is sampled on.

Engines balance best when every request goes where the fewest run. Drafting from siblings wants the
opposite: the responses to a prompt see each other only within a replica. `GroupRouter` lies between
the two, with two knobs: how many siblings may follow each other to a replica, and how far a replica
may be above the mean for it.

Grouping has a cost: siblings have similar lengths, so the long responses of a hard prompt meet on
one replica. Its tail is longer, and while more of them run than the gate allows, it drafts nothing.
`max_siblings_per_replica` limits this: with half a group per replica, half as many meet.

Plain Python: per request a look at every replica, per running group one small object.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable


class LeastLoaded:
    """Every request goes where the fewest run; of equals, to the replica that was named first.

    Args:
        replicas: Names of the replicas, any hashable values.
    """

    def __init__(self, replicas: Iterable[Hashable]) -> None:
        self.running: dict[Hashable, int] = dict.fromkeys(replicas, 0)

    def assign(self, group: Hashable, siblings: int = 1) -> Hashable:
        """Choose the replica of a request that starts now.

        Args:
            group: What the request's siblings have in common.
            siblings: Requests of the group that are expected in all, as far as known.

        Raises:
            LookupError: There is no replica.
        """
        replica = self._least_loaded()
        self.running[replica] += 1
        return replica

    def resume(self, group: Hashable, replica: Hashable) -> None:
        """A request that ended runs again on its replica, as later turns of a conversation do."""
        self.running[replica] += 1

    def finished(self, group: Hashable, replica: Hashable) -> None:
        """A request that was assigned or resumed has ended."""
        if self.running.get(replica):
            self.running[replica] -= 1

    def add(self, replica: Hashable) -> None:
        """A replica has joined; nothing runs there."""
        self.running[replica] = 0

    def remove(self, replica: Hashable) -> None:
        """A replica is gone, with all that ran there."""
        self.running.pop(replica, None)

    def _load(self, replica: Hashable) -> int:
        return self.running[replica]

    def _least_loaded(self) -> Hashable:
        if not self.running:
            raise LookupError("there is no replica")
        return min(self.running, key=self._load)


@dataclasses.dataclass
class _Group:
    """A group with running requests."""

    home: Hashable | None = None  # the replica of its next siblings; None: to be chosen
    left: int = 0  # how many more may go there, where that is limited
    reserved: int = 0  # siblings expected there
    running: int = 0
    sent: Counter[Hashable] = dataclasses.field(default_factory=Counter)  # siblings per replica


class GroupRouter(LeastLoaded):
    """Siblings go to one replica, as long as it is not too far above the others.

    A group's first request goes to the replica with the least load: requests that run there, and
    those that groups of that replica still expect. The next ones follow. A group moves on to
    another replica, again the one with the least load, when it has sent `max_siblings_per_replica`
    requests to one, or when the replica runs `max_imbalance` requests more than the mean of all.
    What was sent stays where it is. A group is forgotten when none of its requests runs.

    Args:
        replicas: Names of the replicas, any hashable values.
        max_siblings_per_replica: Most siblings of a group that a replica gets before every other
            has got as many; 0 for no limit.
        max_imbalance: A replica is not followed while it runs as many requests more than the mean
            of all. Below the size of a group, groups are split even where nothing else runs.
    """

    def __init__(
        self,
        replicas: Iterable[Hashable],
        *,
        max_siblings_per_replica: int = 0,
        max_imbalance: int = 16,
    ) -> None:
        super().__init__(replicas)
        self._share = max_siblings_per_replica
        self._max_imbalance = max_imbalance
        self._reserved: dict[Hashable, int] = dict.fromkeys(self.running, 0)
        self._groups: dict[Hashable, _Group] = {}

    def assign(self, group: Hashable, siblings: int = 1) -> Hashable:
        """As `LeastLoaded.assign`."""
        state = self._groups.get(group) or _Group()
        if not self._may_follow(state):
            self._settle(state, siblings)
        self._groups[group] = state
        self._reserve(state, max(state.reserved - 1, 0))
        state.left -= 1
        state.sent[state.home] += 1
        state.running += 1
        self.running[state.home] += 1
        return state.home

    def resume(self, group: Hashable, replica: Hashable) -> None:
        """As `LeastLoaded.resume`; where the group's next siblings go does not change."""
        super().resume(group, replica)
        # Forgotten while none of its requests ran: the replica holds its texts.
        state = self._groups.setdefault(group, _Group())
        if not state.sent:
            state.sent[replica], state.home, state.left = 1, replica, self._share - 1
        state.running += 1

    def finished(self, group: Hashable, replica: Hashable) -> None:
        """As `LeastLoaded.finished`."""
        super().finished(group, replica)
        state = self._groups.get(group)
        if state is None:
            return
        state.running -= 1
        if state.running <= 0:
            # Siblings that never came keep no place.
            self._reserve(state, 0)
            del self._groups[group]

    def add(self, replica: Hashable) -> None:
        """As `LeastLoaded.add`; a known replica counts as restarted."""
        if replica in self.running:
            self.remove(replica)
        super().add(replica)
        self._reserved[replica] = 0

    def remove(self, replica: Hashable) -> None:
        """As `LeastLoaded.remove`; groups whose home it was will choose another one."""
        super().remove(replica)
        for state in self._groups.values():
            if state.home == replica:
                state.home, state.reserved = None, 0
        self._reserved.pop(replica, None)

    @property
    def groups(self) -> int:
        """Number of groups that are remembered."""
        return len(self._groups)

    def _load(self, replica: Hashable) -> int:
        return self.running[replica] + self._reserved[replica]

    def _may_follow(self, state: _Group) -> bool:
        if state.home is None or (self._share and state.left <= 0):
            return False
        mean = sum(self.running.values()) / len(self.running)
        return self.running[state.home] - mean < self._max_imbalance

    def _settle(self, state: _Group, siblings: int) -> None:
        """Choose the replica of a group's next siblings."""
        self._reserve(state, 0)
        expected = max(siblings - state.sent.total(), 1)
        if not self._share:
            state.home = self._least_loaded()
        else:
            state.home = self._least_loaded_where_few_are(state)
            state.left = self._share - state.sent[state.home] % self._share
            expected = min(expected, state.left)
        self._reserve(state, expected)

    def _least_loaded_where_few_are(self, state: _Group) -> Hashable:
        if not self.running:
            raise LookupError("there is no replica")
        full = {replica: state.sent[replica] // self._share for replica in self.running}
        return min(self.running, key=lambda replica: (full[replica], self._load(replica)))

    def _reserve(self, state: _Group, places: int) -> None:
        if state.home is not None:
            self._reserved[state.home] += places - state.reserved
            state.reserved = places
