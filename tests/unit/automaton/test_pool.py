"""Slots, batches, memory and refusals of the pool."""

import numpy as np
import pytest

from sam_rollout.automaton import kernels
from sam_rollout.automaton.pool import AutomatonFullError, AutomatonPool


def int32(*values):
    return np.array(values, np.int32)


def batch_of(pool, slots, token_ids, lengths, k=3):
    slots = np.asarray(slots, np.int32)
    tokens = np.zeros((len(slots), 3), np.int32)
    counts = np.zeros(len(slots), np.int32)
    rows = np.arange(len(slots), dtype=np.int32)
    pool.extend_and_draft(
        slots, rows, token_ids, np.asarray(lengths, np.int32),
        np.full(len(slots), k, np.int32), tokens, counts,
    )  # fmt: skip
    return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]


def test_rows_of_a_batch_are_independent():
    rng = np.random.default_rng(0)
    token_ids = rng.integers(0, 5, (512, 300)).astype(np.int32)
    lengths = rng.integers(0, 301, 512).astype(np.int32)
    pool = AutomatonPool()
    slots = [pool.open() for _ in range(512)]
    together = batch_of(pool, slots, token_ids, lengths)
    for i in range(0, 512, 37):
        alone = AutomatonPool()
        expected = batch_of(alone, [alone.open()], token_ids[i : i + 1], lengths[i : i + 1])
        assert together[i] == expected[0]
    assert len(pool) == 512
    assert pool.appended_tokens == lengths.sum()


def test_rows_that_are_read_in_turns_are_read_as_if_alone():
    rng = np.random.default_rng(0)
    texts = np.stack([text_like_reasoning(3000, seed) for seed in range(5)])
    together, alone = AutomatonPool(), AutomatonPool()
    slots = np.array([together.open() for _ in texts], np.int32)
    own_slots = [alone.open() for _ in texts]
    rows, lengths = np.arange(5, dtype=np.int32), np.zeros(5, np.int32)
    while lengths.min() < texts.shape[1]:
        lengths = np.minimum(lengths + rng.integers(0, 9, 5), texts.shape[1]).astype(np.int32)
        found = np.zeros((5, kernels.MATCH_WIDTH), np.int32)
        together.extend(slots, rows, texts, lengths)
        together.match_rows(slots, found)
        for row, slot in enumerate(own_slots):
            one = np.zeros((1, kernels.MATCH_WIDTH), np.int32)
            alone.extend(int32(slot), int32(row), texts, lengths[row : row + 1])
            alone.match_rows(int32(slot), one)
            assert (found[row] == one[0]).all()


def test_rows_may_be_views_permuted_and_read_only():
    big = np.zeros((8, 64), np.int32)
    big[5, :6] = [1, 2, 3, 1, 2, 3]
    view = big[1::2, :40]  # row 5 of `big` is row 2 here
    view.flags.writeable = False
    pool = AutomatonPool()
    tokens, counts = np.zeros((1, 3), np.int32), int32(0)
    pool.extend_and_draft(int32(pool.open()), int32(2), view, int32(6), int32(3), tokens, counts)
    assert tokens.tolist() == [[1, 2, 3]]


def test_negative_slots_are_skipped():
    pool = AutomatonPool()
    slot = pool.open()
    token_ids = np.ones((2, 4), np.int32)
    assert batch_of(pool, [-1, slot], token_ids, [4, 4]) == [[], [1, 1, 1]]
    pool.extend(int32(-1), int32(0), token_ids, int32(4))
    assert pool.length(slot) == 4


@pytest.mark.parametrize(("k", "expected"), [(-1, 0), (0, 0), (1, 1), (3, 3), (9, 3)])
def test_k_is_capped_by_the_output(k, expected):
    pool = AutomatonPool()
    drafts = batch_of(pool, [pool.open()], np.ones((1, 4), np.int32), [4], k)
    assert len(drafts[0]) == expected


def test_a_reused_slot_knows_nothing_of_its_past():
    pool = AutomatonPool()
    slot = pool.open()
    batch_of(pool, [slot], np.ones((1, 50), np.int32), [50])
    assert pool.nbytes == pool.nbytes_of(slot) > 0
    pool.close(slot)
    assert pool.nbytes == 0 and len(pool) == 0
    again = pool.open()
    assert again == slot
    assert pool.length(again) == 0 and pool.match(again) == (0, 0)
    assert batch_of(pool, [again], np.array([[1, 2, 3]], np.int32), [3]) == [[]]
    assert pool.rebuilds == 0


@pytest.mark.parametrize(
    ("second", "length"),
    [
        ([1, 2, 1, 2, 1], 3),  # cut
        ([1, 2, 1, 2, 9, 8, 9], 7),  # another last token
        ([1, 2, 1, 2, 1], 0),
    ],
)
def test_a_row_that_is_no_continuation_is_read_again(second, length):
    pool = AutomatonPool()
    slot = pool.open()
    batch_of(pool, [slot], np.array([[1, 2, 1, 2, 1]], np.int32), [5])
    drafts = batch_of(pool, [slot], np.array([second], np.int32), [length])
    fresh = AutomatonPool()
    other = fresh.open()
    assert drafts == batch_of(fresh, [other], np.array([second], np.int32), [length])
    assert pool.match(slot) == fresh.match(other)
    assert pool.length(slot) == length
    assert pool.rebuilds == 1 and fresh.rebuilds == 0


def test_a_difference_anywhere_in_the_last_tokens_is_noticed():
    text = np.arange(100, dtype=np.int32)[None]
    for back in range(1, kernels.GUARD_TOKENS + 1):
        pool = AutomatonPool()
        slot = pool.open()
        pool.extend(int32(slot), int32(0), text, int32(90))
        changed = text.copy()
        changed[0, 90 - back] = 7
        pool.extend(int32(slot), int32(0), changed, int32(95))
        assert pool.rebuilds == 1
        assert pool.length(slot) == 95


def test_repeated_calls_without_new_tokens_change_nothing():
    pool = AutomatonPool()
    slot = pool.open()
    text = np.array([[1, 2, 1, 2]], np.int32)
    first = batch_of(pool, [slot], text, [4])
    match, nbytes = pool.match(slot), pool.nbytes
    assert batch_of(pool, [slot], text, [4]) == first
    assert (pool.match(slot), pool.nbytes, pool.appended_tokens) == (match, nbytes, 4)


def test_slots_can_outgrow_the_first_table():
    pool = AutomatonPool()
    slots = [pool.open() for _ in range(100)]
    assert sorted(slots) == list(range(100))
    token_ids = np.tile(np.array([[1, 2, 1]], np.int32), (100, 1))
    assert batch_of(pool, slots, token_ids, [3] * 100) == [[2, 1, 2]] * 100
    for slot in slots[::2]:
        pool.close(slot)
    assert len(pool) == 50
    assert batch_of(pool, slots[1::2], token_ids, [3] * 50) == [[2, 1, 2]] * 50


def text_like_reasoning(tokens, seed=0):
    """New stretches and copied ones, int32[tokens]."""
    rng = np.random.default_rng(seed)
    text = []
    while len(text) < tokens:
        text += (rng.zipf(1.3, rng.integers(1, 12)) % 150_000).tolist()
        start = int(rng.integers(0, len(text)))
        text += text[start : start + int(rng.integers(2, 20))]
    return np.array(text[:tokens], np.int32)


def test_a_text_takes_few_bytes_per_token():
    text = text_like_reasoning(50_000)[None]
    pool = AutomatonPool()
    slot = int32(pool.open())
    for n in range(10, 50_001, 10):
        pool.extend(slot, int32(0), text, int32(n))
        assert n < 4000 or pool.nbytes / n < 64


def test_growing_moves_little_at_a_time():
    """No single token has more work to do than some hundred slots, however long the text is."""
    text = text_like_reasoning(100_000)[None]
    pool = AutomatonPool()
    slot = pool.open()
    header = pool._automata.table[0]
    most_slots, most_blocks = 0, 0
    for n in range(1, 100_001):
        frontier, blocks = int(header[kernels.FRONTIER]), pool._arena.used_blocks
        moving = bool(header[kernels.OLD_EDGE_SLOTS])
        pool.extend(int32(slot), int32(0), text, int32(n))
        if moving and n > 1000:
            most_slots = max(most_slots, int(header[kernels.FRONTIER]) - frontier)
        if n > 1000:
            most_blocks = max(most_blocks, pool._arena.used_blocks - blocks)
    assert 0 < most_slots < 1000
    assert 0 < most_blocks <= kernels.BLOCKS_PER_TOKEN


def test_blocks_go_back_to_the_arena_and_to_the_system():
    text = text_like_reasoning(30_000)[None]
    pool = AutomatonPool()
    slots = [pool.open() for _ in range(4)]
    for slot in slots:
        pool.extend(int32(slot), int32(0), text, int32(30_000))
    blocks, used = pool._arena.blocks, pool.nbytes
    assert sum(pool.nbytes_of(slot) for slot in slots) == used
    pool.close(slots[0])
    assert pool.nbytes == pytest.approx(used * 3 / 4)
    slots[0] = pool.open()
    pool.extend(int32(slots[0]), int32(0), text, int32(30_000))
    assert pool._arena.blocks == blocks, "what was given back is taken first"
    for slot in slots:
        pool.close(slot)
    assert (pool.nbytes, pool._arena.blocks) == (0, 0)


def test_idle_slabs_are_released_while_others_are_used():
    text = text_like_reasoning(400_000)[None]
    pool = AutomatonPool()
    small = pool.open()
    pool.extend(int32(small), int32(0), text, int32(100))
    slots = [pool.open() for _ in range(5)]
    for slot in slots:
        pool.extend(int32(slot), int32(0), text, int32(400_000))
    blocks = pool._arena.blocks
    for slot in slots:
        pool.close(slot)
    assert pool._arena.blocks < blocks / 2
    before = pool.match(small)
    again = pool.open()
    pool.extend(int32(again), int32(0), text, int32(50_000))
    assert pool.match(small) == before


def test_slots_of_a_common_automaton():
    pool = AutomatonPool()
    automaton = pool.create()
    a, b = pool.open(automaton), pool.open(automaton)
    rows = np.array([[1, 2, 3, 4, 5], [1, 2, 9, 3, 4]], np.int32)
    assert batch_of(pool, [a, b], rows, [5, 5]) == [[], [5]]
    assert pool.nbytes_of(a) == pool.nbytes_of(b) == pool.nbytes
    with pytest.raises(ValueError, match=f"automaton {automaton} has open slots"):
        pool.destroy(automaton)
    pool.close(a)
    assert pool.nbytes > 0
    assert batch_of(pool, [b], rows[1:], [5]) == [[5]], "a closed text stays to be found"
    pool.close(b)
    pool.destroy(automaton)
    assert pool.nbytes == 0
    for call in (pool.destroy, pool.open):
        with pytest.raises(IndexError, match=f"automaton {automaton} is not open"):
            call(automaton)


def test_a_changed_text_of_a_common_automaton_starts_anew_and_leaves_the_others():
    pool = AutomatonPool()
    automaton = pool.create()
    a, b = pool.open(automaton), pool.open(automaton)
    rows = np.array([[1, 2, 3, 4], [7, 8, 2, 3]], np.int32)
    batch_of(pool, [a, b], rows, [4, 4])
    assert batch_of(pool, [a], np.array([[5, 6, 8]], np.int32), [3]) == [[2, 3, 4]]
    assert pool.rebuilds == 1
    assert pool.length(a) == 3
    assert batch_of(pool, [b], rows[1:], [4]) == [[4]]


def test_the_most_frequent_continuation_wins_in_a_common_automaton():
    pool = AutomatonPool()
    automaton = pool.create()
    texts = [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9, 6], [1, 2]]
    slots = [pool.open(automaton) for _ in texts]
    for slot, text in zip(slots, texts, strict=True):
        drafts = batch_of(pool, [slot], np.array([text], np.int32), [len(text)], k=1)
    assert drafts == [[3]]


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.float32])
def test_token_ids_of_another_type_are_refused(dtype):
    pool = AutomatonPool()
    with pytest.raises(TypeError, match=r"token_ids must be int32\[R, L\]"):
        pool.extend(int32(pool.open()), int32(0), np.zeros((1, 4), dtype), int32(4))


def test_other_arrays_are_checked_by_name():
    pool = AutomatonPool()
    slot, text = pool.open(), np.zeros((1, 4), np.int32)
    with pytest.raises(TypeError, match="lengths must be int32, got int64"):
        pool.extend(int32(slot), int32(0), text, np.array([4]))
    with pytest.raises(ValueError, match="rows has 2 rows, slots has 1"):
        pool.extend(int32(slot), int32(0, 0), text, int32(4))
    with pytest.raises(TypeError, match="token_ids"):
        pool.extend(int32(slot), int32(0), text[0], int32(4))


def test_a_negative_token_is_named_and_the_text_before_it_kept():
    pool = AutomatonPool()
    slot = pool.open()
    text = np.array([[1, 2, -1, 2]], np.int32)
    with pytest.raises(ValueError, match=r"token_ids\[0, 2\] = -1"):
        pool.extend(int32(slot), int32(0), text, int32(4))
    assert pool.length(slot) == 2
    text[0, 2] = 1
    assert batch_of(pool, [slot], text, [3]) == [[2, 1, 2]]


@pytest.mark.parametrize(("row", "length"), [(1, 2), (-1, 2), (0, 5), (0, -1)])
def test_rows_and_lengths_outside_the_array_are_refused(row, length):
    pool = AutomatonPool()
    with pytest.raises(IndexError, match="lies outside"):
        pool.extend(int32(pool.open()), int32(row), np.zeros((1, 4), np.int32), int32(length))


@pytest.mark.parametrize("slot", [0, 5, 10_000])
def test_slots_that_are_not_open_are_refused(slot):
    pool = AutomatonPool()
    with pytest.raises(IndexError, match=f"= {slot} is not an open slot"):
        pool.extend(int32(slot), int32(0), np.zeros((1, 4), np.int32), int32(4))
    for call in (pool.close, pool.length, pool.match):
        with pytest.raises(IndexError, match=f"slot {slot} is not open"):
            call(slot)


def test_a_closed_slot_is_refused_until_it_is_opened_again():
    pool = AutomatonPool()
    slot, text = pool.open(), np.zeros((1, 4), np.int32)
    pool.extend(int32(slot), int32(0), text, int32(4))
    pool.close(slot)
    with pytest.raises(IndexError, match="is not an open slot"):
        pool.extend(int32(slot), int32(0), text, int32(4))
    with pytest.raises(IndexError, match="is not open"):
        pool.close(slot)


def test_an_automaton_that_is_full_is_named():
    pool = AutomatonPool()
    other, automaton = pool.create(), pool.create()
    slots = int32(pool.open(other), pool.open(automaton))
    rows = np.ones((2, 4), np.int32)
    pool.extend(slots, int32(0, 1), rows, int32(2, 2))
    blocks = pool._automata.table[:, kernels.PREFIX_BLOCKS]
    blocks[automaton] = kernels.MOST_PREFIX_BLOCKS
    with pytest.raises(AutomatonFullError, match=r"rows\[1\].*16777216") as caught:
        pool.extend(slots, int32(0, 1), rows, int32(3, 3))
    assert caught.value.automaton == automaton
    blocks[automaton] = 1
    assert pool.length(int(slots[0])) == 3 and pool.length(int(slots[1])) == 2


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="max_link_updates must be at least 1, got 0"):
        AutomatonPool(max_link_updates=0)


def test_nothing_compiles_after_warm_up():
    kernels.warm_up()
    for kernel in (kernels.extend_rows, kernels.match_rows, kernels.draft_rows):
        assert len(kernel.signatures) == 1
        with pytest.raises(TypeError):
            kernel()
