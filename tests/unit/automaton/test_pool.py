import numpy as np
import pytest

from sam_rollout.automaton import kernels
from sam_rollout.automaton.interface import NOWHERE, PLACE_KIND, PLACE_STATE, AutomatonFullError
from sam_rollout.automaton.pool import AutomatonPool
from tests.unit.automaton.pools import (
    Vote,
    draft,
    draft_rows,
    int32,
    places_of,
    read,
    votes_at,
    votes_of,
)


@pytest.fixture
def pool():
    return AutomatonPool()


def text_like_reasoning(tokens, seed=0):
    rng = np.random.default_rng(seed)
    text = []
    while len(text) < tokens:
        text += (rng.zipf(1.3, rng.integers(1, 12)) % 150_000).tolist()
        start = int(rng.integers(0, len(text)))
        text += text[start : start + int(rng.integers(2, 20))]
    return np.array(text[:tokens], np.int32)


@pytest.mark.parametrize("automata", [0, 1, 3])
@pytest.mark.parametrize(("rows", "tokens"), [(5, 3000), (100, 60)])
def test_rows_that_are_read_together_are_read_as_if_alone(pool, automata, rows, tokens):
    rng = np.random.default_rng(0)
    texts = np.stack([text_like_reasoning(tokens, seed) for seed in range(rows)])
    if automata:  # most tokens of the texts are the same
        same = rng.random(texts.shape) < 0.9
        texts = np.where(same, texts[0], texts).astype(np.int32)
    alone = AutomatonPool()
    shared, shared_alone = ([one.create() for _ in range(automata)] for one in (pool, alone))
    slots, slots_alone = [], []
    for row in range(rows):
        number = row % (automata + 1)  # with the last number, a row has its own automaton
        slots.append(pool.open(shared[number] if number < automata else None))
        slots_alone.append(alone.open(shared_alone[number] if number < automata else None))
    lengths = np.zeros(rows, np.int32)
    while lengths.min() < tokens:
        before = lengths
        lengths = np.minimum(lengths + rng.integers(0, 9, rows), tokens).astype(np.int32)
        pool.extend(int32(*slots), np.arange(rows, dtype=np.int32), texts, lengths)
        for slot, text, start, end in zip(slots_alone, texts, before, lengths, strict=True):
            for length in range(start + 1, end + 1):
                read(alone, slot, text, length)
        places, places_alone = places_of(pool, *slots), places_of(alone, *slots_alone)
        assert (places[:, PLACE_STATE:] == places_alone[:, PLACE_STATE:]).all()
        assert [*map(votes_at, places)] == [*map(votes_at, places_alone)]
    assert pool.appended_tokens == rows * tokens
    assert pool.nbytes == alone.nbytes
    assert len(pool) == rows


def test_rows_may_be_views_permuted_and_read_only(pool):
    big = np.zeros((8, 64), np.int32)
    big[5, :6] = [1, 2, 3, 1, 2, 3]
    view = big[1::2, :40]  # row 5 of `big` is row 2 here
    view.flags.writeable = False
    slot = pool.open()
    pool.extend(int32(slot), int32(2), view, int32(6))
    assert votes_of(pool, slot)[0] == Vote.of(1, 3, 1, 1, True, 2)


def test_a_reused_slot_knows_nothing_of_its_past(pool):
    slot = pool.open()
    read(pool, slot, [1] * 50, 50)
    assert pool.nbytes == pool.nbytes_of(slot) > 0
    pool.close(slot)
    assert pool.nbytes == 0 and len(pool) == 0
    again = pool.open()
    assert again == slot
    assert pool.length(again) == 0 and places_of(pool, again)[0, PLACE_KIND] == NOWHERE
    assert draft(pool, again, [1, 2, 3], 3, 3) == []
    assert pool.rebuilds == 0


@pytest.mark.parametrize(
    ("second", "length"),
    [
        ([1, 2, 1, 2, 1], 3),  # a cut text
        ([1, 2, 1, 2, 9, 8, 9], 7),  # a longer text, but its fifth token has changed
        ([1, 2, 1, 2, 1], 0),
    ],
)
def test_a_row_that_is_no_continuation_is_read_again(pool, second, length):
    slot = pool.open()
    read(pool, slot, [1, 2, 1, 2, 1], 5)
    fresh = AutomatonPool()
    other = fresh.open()
    assert draft(pool, slot, second, length, 3) == draft(fresh, other, second, length, 3)
    assert votes_of(pool, slot) == votes_of(fresh, other)
    assert pool.length(slot) == length
    assert pool.rebuilds == 1 and fresh.rebuilds == 0


@pytest.mark.parametrize("back", range(1, kernels.GUARD_TOKENS + 1))
def test_a_difference_anywhere_in_the_last_tokens_is_noticed(pool, back):
    text = np.arange(100)
    slot = pool.open()
    read(pool, slot, text, 90)
    text[90 - back] = 7
    read(pool, slot, text, 95)
    assert pool.rebuilds == 1
    assert pool.length(slot) == 95


def test_a_text_takes_few_bytes_per_token(pool):
    text = text_like_reasoning(50_000)
    slot = pool.open()
    for n in range(10, 50_001, 10):
        read(pool, slot, text, n)
        assert n < 4000 or pool.nbytes / n < 72


def test_growing_moves_little_at_a_time(pool):
    text = text_like_reasoning(100_000)
    slot = pool.open()
    header = pool._automata.table[0]
    most_slots, most_blocks = 0, 0
    for n in range(1, 100_001):
        frontier, blocks = int(header[kernels.FRONTIER]), pool._arena.used_blocks
        moving = bool(header[kernels.OLD_EDGE_SLOTS])
        read(pool, slot, text, n)
        if moving and n > 1000:
            most_slots = max(most_slots, int(header[kernels.FRONTIER]) - frontier)
        if n > 1000:
            most_blocks = max(most_blocks, pool._arena.used_blocks - blocks)
    assert 0 < most_slots < 1000
    assert 0 < most_blocks <= kernels.BLOCKS_PER_TOKEN


def test_idle_slabs_are_released_while_others_are_used(pool):
    text = text_like_reasoning(400_000)
    small = pool.open()
    read(pool, small, text, 100)
    slots = [pool.open() for _ in range(5)]
    for slot in slots:
        read(pool, slot, text, 400_000)
    blocks = pool._arena.blocks
    assert sum(pool.nbytes_of(slot) for slot in (small, *slots)) == pool.nbytes
    for slot in slots:
        pool.close(slot)
    assert pool._arena.blocks < blocks / 2
    before = votes_of(pool, small)
    again = pool.open()
    read(pool, again, text, 50_000)
    assert before and votes_of(pool, small) == before
    for slot in (small, again):
        pool.close(slot)
    assert (pool.nbytes, pool._arena.blocks) == (0, 0)


def test_slots_of_a_common_automaton(pool):
    automaton = pool.create()
    a, b = pool.open(automaton), pool.open(automaton)
    rows = np.array([[1, 2, 3, 4, 5], [1, 2, 9, 3, 4]], np.int32)
    assert draft_rows(pool, [a, b], rows, [5, 5]) == [[], [5]]
    assert pool.nbytes_of(a) == pool.nbytes_of(b) == pool.nbytes
    with pytest.raises(ValueError, match=f"automaton {automaton} has open slots"):
        pool.destroy(automaton)
    pool.close(a)
    assert pool.nbytes > 0
    assert draft(pool, b, rows[1], 5, 3) == [5], "a closed text can still be found"
    pool.close(b)
    pool.destroy(automaton)
    assert pool.nbytes == 0
    for call in (pool.destroy, pool.open):
        with pytest.raises(IndexError, match=f"automaton {automaton} is not open"):
            call(automaton)


def test_a_changed_text_of_a_common_automaton_starts_anew_and_leaves_the_others(pool):
    automaton = pool.create()
    a, b = pool.open(automaton), pool.open(automaton)
    read(pool, a, [1, 2, 3, 4], 4)
    read(pool, b, [7, 8, 2, 3], 4)
    assert draft(pool, a, [5, 6, 8], 3, 3) == [2, 3, 4]
    assert pool.rebuilds == 1
    assert pool.length(a) == 3
    assert draft(pool, b, [7, 8, 2, 3], 4, 3) == [4]


# Fields that differ from a valid call. Slot 0 is open, slot 1 is closed.
REFUSED = {
    "row too large": {"rows": int32(1)},
    "row negative": {"rows": int32(-1)},
    "too long": {"lengths": int32(5)},
    "length negative": {"lengths": int32(-1)},
    "closed": {"slots": int32(1)},
    "never open": {"slots": int32(5)},
    "beyond the table": {"slots": int32(10_000)},
}


@pytest.mark.parametrize("changed", REFUSED.values(), ids=REFUSED)
def test_no_call_reads_beyond_its_arrays(pool, changed):
    sound = {"slots": int32(pool.open()), "rows": int32(0), "lengths": int32(4)}
    sound["token_ids"] = np.zeros((1, 4), np.int32)
    closed = pool.open()
    read(pool, closed, [0] * 4, 4)
    pool.close(closed)
    with pytest.raises(IndexError, match="the slot is not open, or the row is not in token_ids"):
        pool.extend(**sound | changed)
    for call in (pool.close, pool.length, pool.nbytes_of, pool.group_of):
        with pytest.raises(IndexError, match=f"slot {closed} is not open"):
            call(closed)


def test_a_negative_token_is_named_and_the_text_before_it_kept(pool):
    slot = pool.open()
    with pytest.raises(ValueError, match="token 2 is negative"):
        read(pool, slot, [1, 2, -1, 2], 4)
    assert pool.length(slot) == 2
    assert draft(pool, slot, [1, 2, 1], 3, 3) == [2, 1, 2]


def test_a_negative_token_is_no_way_to_memory_that_was_never_written(pool):
    rng = np.random.default_rng(5)
    for length in range(3, 40):
        slot = pool.open()
        text = rng.integers(0, 3, length + 8)
        text[length] = -1
        read(pool, slot, text, length)
        with pytest.raises(ValueError, match=f"token {length} is negative"):
            read(pool, slot, text, length + 8)
        pool.close(slot)


def test_an_automaton_that_is_full_is_named(pool):
    slot = pool.open()
    read(pool, slot, [1, 2, 3], 2)
    blocks = pool._automata.table[:, kernels.PREFIX_BLOCKS]
    blocks[0] = kernels.MOST_PREFIX_BLOCKS
    with pytest.raises(AutomatonFullError, match="automaton 0 holds no more than 16777216 tokens"):
        read(pool, slot, [1, 2, 3], 3)
    blocks[0] = 1
    assert pool.length(slot) == 2


def test_an_automaton_of_another_pool_is_taken_over_with_its_memory(pool):
    old, new = text_like_reasoning(20_000, seed=1), text_like_reasoning(20_000, seed=2)
    reference, maker = AutomatonPool(), AutomatonPool()
    own = pool.open()
    read(pool, own, new, 5000)
    together, shared = (one.create() for one in (reference, maker))
    for one, automaton in ((reference, together), (maker, shared)):
        slot = one.open(automaton)
        read(one, slot, old, len(old))
        one.close(slot)
    before, made = pool.nbytes, maker.nbytes
    adopted = pool.adopt(maker)
    assert (pool.nbytes, maker.nbytes) == (before + made, 0)
    del maker
    slots = reference.open(together), pool.open(adopted)
    for length in (1000, len(new)):
        drafts = [
            draft(one, slot, new, length, 3)
            for one, slot in zip((reference, pool), slots, strict=True)
        ]
        assert drafts[0] == drafts[1]
    alone = AutomatonPool()
    assert draft(pool, own, new, len(new), 3) == draft(alone, alone.open(), new, len(new), 3)
    for slot in (own, slots[1]):
        pool.close(slot)
    pool.destroy(adopted)
    assert pool.nbytes == 0
