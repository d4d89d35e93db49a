"""The automaton against a brute-force matcher: match, draft, and independence of chunking."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.automaton import AutomatonPool, kernels

UNLIMITED = 1 << 30
LARGEST_TOKEN = 2**31 - 1


def int32(*values):
    return np.array(values, np.int32)


def read(pool, slot, text, length):
    row = np.asarray(text, np.int32)[None]
    pool.extend(int32(slot), int32(0), row, int32(length))


def draft(pool, slot, text, length, k):
    row = np.asarray(text, np.int32)[None]
    tokens, counts = np.full((1, k), -7, np.int32), int32(-7)
    pool.extend_and_draft(int32(slot), int32(0), row, int32(length), int32(k), tokens, counts)
    assert (tokens[0, counts[0] :] == -7).all()
    return tokens[0, : counts[0]].tolist()


def brute_force_match(text):
    """(length, end) of the longest suffix that occurred before, at its latest occurrence."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        for end in range(n - 1, length - 1, -1):
            if text[end - length : end] == text[n - length :]:
                return length, end
    return 0, 0


def continuation(text, end, k):
    """What follows position `end`, going on periodically when the text is used up."""
    period = len(text) - end
    return [text[end + j % period] for j in range(k)]


def structure(pool, slot):
    """Everything that defines an automaton: counters, live states, set of branching edges."""
    header = pool._table[slot]
    states, edges = pool._buffers[slot]
    origin, clones = header[kernels.CLONE_CAPACITY], header[kernels.CLONES]
    length = header[kernels.LENGTH]
    live = states[origin - clones : origin + length + 1].copy()
    live[:, kernels.FIRST_EDGE] = 0  # where an edge lies depends on when the table grew
    live[-1, kernels.NEXT_TOKEN] = 0  # not read yet
    stored = {tuple(edge) for edge in edges[:, :3].tolist() if edge[kernels.TARGET] != 0}
    assert len(stored) == header[kernels.EDGE_COUNT]
    counters = header[[kernels.LENGTH, kernels.CLONES, kernels.MATCH_LENGTH, kernels.MATCH_END]]
    return counters.tolist(), live.tolist(), stored


@st.composite
def texts(draw):
    """Random, periodic and copied stretches over few token ids, 0 and the largest among them."""
    alphabet = draw(st.lists(st.integers(0, LARGEST_TOKEN), min_size=1, max_size=4, unique=True))
    alphabet[0] = draw(st.sampled_from([0, LARGEST_TOKEN, alphabet[0]]))
    text = []
    for _ in range(draw(st.integers(1, 5))):
        stretch = draw(st.lists(st.sampled_from(alphabet), min_size=1, max_size=9))
        text += stretch * draw(st.integers(1, 3))
        start = draw(st.integers(0, len(text) - 1))
        text += text[start : start + draw(st.integers(0, 12))]
    return text


@settings(max_examples=150, deadline=None)
@given(texts())
def test_match_is_the_longest_earlier_suffix_at_its_latest_end(text):
    pool = AutomatonPool(initial_capacity=1, max_link_updates=UNLIMITED)
    slot = pool.open()
    for n in range(1, len(text) + 1):
        read(pool, slot, text, n)
        assert pool.match(slot) == brute_force_match(text[:n])


@settings(max_examples=150, deadline=None)
@given(texts(), st.integers(1, 8), st.integers(1, 8))
def test_bounded_link_updates_keep_the_length_and_a_true_occurrence(text, max_link_updates, k):
    pool = AutomatonPool(initial_capacity=1, max_link_updates=max_link_updates)
    slot = pool.open()
    for n in range(1, len(text) + 1):
        tokens = draft(pool, slot, text, n, k)
        length, end = pool.match(slot)
        assert length == brute_force_match(text[:n])[0]
        if length == 0:
            assert tokens == []
            continue
        assert length <= end < n
        assert text[end - length : end] == text[n - length : n]
        assert tokens == continuation(text[:n], end, k)


@settings(max_examples=100, deadline=None)
@given(texts(), st.data())
def test_chunking_changes_nothing(text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    one_by_one = AutomatonPool(initial_capacity=1)
    chunked = AutomatonPool(initial_capacity=len(text))
    a, b = one_by_one.open(), chunked.open()
    for n in range(len(text) + 1):
        read(one_by_one, a, text, n)
    for n in [*cuts, len(text)]:
        read(chunked, b, text, n)
    assert structure(one_by_one, a) == structure(chunked, b)


@settings(max_examples=100, deadline=None)
@given(texts(), texts())
def test_a_rebuilt_automaton_keeps_nothing_of_its_first_text(first, second):
    pool, fresh = AutomatonPool(initial_capacity=1), AutomatonPool(initial_capacity=1)
    a, b = pool.open(), fresh.open()
    read(pool, a, first, len(first))
    read(pool, a, second, 0)
    read(pool, a, second, len(second))
    read(fresh, b, second, len(second))
    assert pool.rebuilds == 1
    assert structure(pool, a) == structure(fresh, b)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([5, 5], [5, 5, 5, 5, 5]),
        ([7, 7, 7, 7], [7, 7, 7, 7, 7]),
        ([1, 2, 3, 1], [2, 3, 1, 2, 3]),
        ([9, 1, 2, 1, 2, 1], [2, 1, 2, 1, 2]),
        ([0, 3, 0], [3, 0, 3, 0, 3]),
        ([1, 2, 8, 1, 2, 9, 1, 2], [9, 1, 2, 9, 1]),  # latest, not first
        ([1, 2, 3], []),
        ([4], []),
        ([], []),
    ],
)
def test_drafts_of_small_texts(text, expected):
    pool = AutomatonPool()
    row = text or [0]
    assert draft(pool, pool.open(), row, len(text), 5) == expected


def test_a_draft_follows_the_latest_end_though_the_state_was_split():
    text = [1, 2, 3, 9, 1, 2, 4, 9, 2, 5, 9, 1, 2]
    pool = AutomatonPool()
    assert draft(pool, pool.open(), text, len(text), 1) == [4]
    assert draft(pool, pool.open(), text[:-2] + [2], len(text) - 1, 1) == [5]


LONG = 200_000


def long_texts():
    random = np.random.default_rng(1)
    fibonacci, previous = [0, 1], [0]
    while len(fibonacci) < LONG:
        fibonacci, previous = fibonacci + previous, fibonacci
    half = np.zeros(LONG // 2, int)
    return {
        "all equal": np.zeros(LONG, int),
        "periodic": np.arange(LONG) % 977,
        "binary": random.integers(0, 2, LONG),
        "fibonacci": np.array(fibonacci[:LONG]),
        "one run, then another": np.concatenate([half, half + 1]),
        "run, then new tokens": np.concatenate([half, np.arange(LONG // 2) + 1]),
        "vocabulary": random.integers(0, 150_000, LONG),
    }


@pytest.mark.parametrize("name", list(long_texts()))
def test_long_texts_are_quick_and_right(name):
    text = long_texts()[name].astype(np.int32)
    pool = AutomatonPool(initial_capacity=1)
    slot = pool.open()
    started = time.perf_counter()
    read(pool, slot, text, LONG)
    # 3-90 ms; a step whose cost grows with the text would need minutes.
    assert time.perf_counter() - started < 5
    assert pool.nbytes / LONG < 110
    length, end = pool.match(slot)
    # Strings search fast; ids are moved beyond the surrogates.
    string = "".join(map(chr, (text + 0xE000).tolist()))
    suffix = string[LONG - length :]
    assert string[end - length : end] == suffix
    assert string.find(string[LONG - length - 1 :], 0, LONG - 1) == -1


def test_many_branching_edges_survive_growth():
    tokens = np.random.default_rng(2).permutation(5000) * 7919 % LARGEST_TOKEN
    text = np.concatenate([tokens, [3], tokens[::-1], [5]]).astype(np.int32)
    pool = AutomatonPool(initial_capacity=1)
    slot = pool.open()
    for n in range(1, len(text) + 1, 97):
        read(pool, slot, text, n)
    # Any earlier token, asked for again, is found through the root's 5000 edges.
    for i in (0, 1, 2500, 4998):
        probe = np.append(text, tokens[i]).astype(np.int32)
        other = pool.open()
        assert draft(pool, other, probe, len(probe), 1) == [text[10000 - i + 1]]
        pool.close(other)
