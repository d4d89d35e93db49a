"""Slots, batches, memory and refusals of the pool."""

import numpy as np
import pytest

from sam_rollout.automaton import AutomatonPool, kernels


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
    pool = AutomatonPool(initial_capacity=4)
    slots = [pool.open() for _ in range(512)]
    together = batch_of(pool, slots, token_ids, lengths)
    for i in range(0, 512, 37):
        alone = AutomatonPool()
        expected = batch_of(alone, [alone.open()], token_ids[i : i + 1], lengths[i : i + 1])
        assert together[i] == expected[0]
    assert len(pool) == 512
    assert pool.appended_tokens == lengths.sum()


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


def test_growth_stops_at_the_longest_text():
    bounded, free = AutomatonPool(max_length=1200), AutomatonPool()
    text = np.zeros((1, 1200), np.int32)
    for pool in (bounded, free):
        slot = int32(pool.open())
        pool.extend(slot, int32(0), text, int32(1000))
        pool.extend(slot, int32(0), text, int32(1200))
    assert bounded.nbytes < free.nbytes


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


@pytest.mark.parametrize("name", ["initial_capacity", "max_link_updates"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        AutomatonPool(**{name: 0})


def test_nothing_compiles_after_warm_up():
    kernels.warm_up()
    for kernel in (kernels.extend_rows, kernels.extend_and_draft_rows, kernels.move_edges):
        assert len(kernel.signatures) == 1
        with pytest.raises(TypeError):
            kernel()
