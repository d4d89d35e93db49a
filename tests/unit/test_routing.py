"""Routing: siblings stay together, replicas stay even, and nothing is remembered for ever."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam_rollout.routing import GroupRouter, LeastLoaded


def place(router: LeastLoaded, groups: Iterable[str], siblings: int = 1) -> list:
    return [router.assign(group, siblings) for group in groups]


def by_group(groups: Iterable[str], replicas: list) -> dict[str, Counter]:
    found: dict[str, Counter] = defaultdict(Counter)
    for group, replica in zip(groups, replicas, strict=True):
        found[group][replica] += 1
    return found


GROUPS = [f"g{number}" for number in range(8)]
ONE_AFTER_THE_OTHER = [group for group in GROUPS for _ in range(16)]
IN_TURNS = GROUPS * 16


def test_least_loaded_is_even_and_takes_the_first_of_equals():
    router = LeastLoaded(range(3))
    assert place(router, ["g"] * 7) == [0, 1, 2, 0, 1, 2, 0]
    router.finished("g", 2)
    assert router.assign("other") == 2


@pytest.mark.parametrize("order", [ONE_AFTER_THE_OTHER, IN_TURNS], ids=["in a row", "in turns"])
@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
def test_groups_stay_whole_and_replicas_even(order, replicas):
    router = GroupRouter(range(replicas))
    found = by_group(order, place(router, order, siblings=16))
    assert all(len(homes) == 1 for homes in found.values())
    assert set(router.running.values()) == {128 // replicas}


@pytest.mark.parametrize("order", [ONE_AFTER_THE_OTHER, IN_TURNS], ids=["in a row", "in turns"])
def test_half_a_group_a_replica(order):
    router = GroupRouter(range(4), max_siblings_per_replica=8)
    found = by_group(order, place(router, order, siblings=16))
    assert all(sorted(homes.values()) == [8, 8] for homes in found.values())
    assert set(router.running.values()) == {32}


def test_a_group_larger_than_all_shares_starts_over():
    assert place(GroupRouter("ab", max_siblings_per_replica=2), ["x"] * 7, siblings=7) == [
        *"aabbaab"
    ]


def test_what_is_expected_counts_as_load():
    """Or a second group would be sent where the first one's siblings are still to come."""
    router = GroupRouter("ab")
    assert router.assign("large", siblings=16) == "a"
    assert place(router, [f"small{n}" for n in range(15)]) == ["b"] * 15


def test_siblings_that_never_came_keep_no_place():
    router = GroupRouter("ab")
    router.finished("large", router.assign("large", siblings=16))
    assert place(router, ["x", "y"], siblings=4) == ["a", "b"]
    assert router.groups == 2


def test_a_replica_above_the_mean_is_not_followed():
    """The other one ran empty while the group's siblings were still coming."""
    router = GroupRouter("ab", max_imbalance=4)
    place(router, ["x"] * 6, siblings=6)
    for _ in range(6):
        router.assign("y", siblings=10)
    assert router.running == {"a": 6, "b": 6}
    for _ in range(6):
        router.finished("x", "a")
    # b runs 6, the mean is 3: one more may follow, and the next sees 7 - 3.5; at 8 it is 4 above.
    assert place(router, ["y"] * 4, siblings=10) == ["b", "b", "a", "a"]


def test_a_bound_below_the_group_splits_it_where_nothing_else_runs():
    assert place(GroupRouter("ab", max_imbalance=2), ["x"] * 8, siblings=8) == [*"aaaabbbb"]


def test_later_turns_run_where_the_first_did():
    router = GroupRouter("ab")
    home = router.assign("x", siblings=2)
    router.finished("x", home)
    assert router.groups == 0
    router.assign("y", siblings=5)
    router.resume("x", home)
    assert router.assign("x", siblings=2) == home, "its texts are there"
    router.finished("x", home)
    assert router.groups == 2, "one of x still runs"
    router.finished("x", home)
    assert router.groups == 1


def test_a_replica_that_left_is_not_followed_and_comes_back_empty():
    router = GroupRouter("ab")
    assert place(router, ["x"] * 3, siblings=8) == ["a"] * 3
    router.remove("a")
    assert place(router, ["x"] * 2, siblings=8) == ["b"] * 2
    router.finished("x", "a")
    router.add("a")
    assert router.running == {"b": 2, "a": 0}
    assert router.assign("y") == "a"


@pytest.mark.parametrize("router", [LeastLoaded([]), GroupRouter([])])
def test_without_replicas_there_is_an_error(router):
    with pytest.raises(LookupError, match="no replica"):
        router.assign("x")


# A group's next request, or (negative) the end of one that runs.
EVENTS = st.lists(st.integers(-30, 12), max_size=200)


@given(st.integers(1, 5), st.integers(0, 6), st.integers(1, 8), EVENTS)
def test_whatever_happens_counts_are_right_and_groups_are_forgotten(
    replicas, max_siblings, max_imbalance, events
):
    router = GroupRouter(
        range(replicas), max_siblings_per_replica=max_siblings, max_imbalance=max_imbalance
    )
    running: list[tuple[int, int]] = []
    for event in events:
        if event >= 0:
            running.append((event, router.assign(event, siblings=4)))
        elif running:
            router.finished(*running.pop(event % len(running)))
        counts = Counter(replica for _, replica in running)
        assert router.running == {replica: counts[replica] for replica in range(replicas)}
        assert router.groups == len({group for group, _ in running})
    for group, replica in running:
        router.finished(group, replica)
    assert router.groups == 0
    assert router.assign("new") == 0, "no reservation is left behind"


@given(st.integers(1, 5), st.integers(1, 8), EVENTS)
def test_nobody_is_sent_above_the_bound_but_to_the_replica_with_the_fewest(
    replicas, max_imbalance, events
):
    router = GroupRouter(range(replicas), max_imbalance=max_imbalance)
    running: list[tuple[int, int]] = []
    for event in events:
        if event >= 0:
            before = dict(router.running)
            replica = router.assign(event)
            mean = sum(before.values()) / replicas
            assert before[replica] < mean + max_imbalance or before[replica] == min(before.values())
            running.append((event, replica))
        elif running:
            router.finished(*running.pop(event % len(running)))


def test_a_known_replica_that_joins_again_begins_anew():
    router = GroupRouter(["a", "b"])
    router.assign("g", 8)
    router.add("a")
    router.finished("g", "a")
    assert [router.assign(group, 1) for group in ("h", "i")] == ["b", "a"]
    assert router.running == {"a": 1, "b": 1}
