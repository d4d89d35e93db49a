"""The automaton against a brute-force matcher: match, draft, and independence of chunking."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.automaton import kernels
from sam_rollout.automaton.pool import AutomatonPool
from tests.unit.automaton.pools import Memory, draft, draft_rows, matches_of, read

UNLIMITED = 1 << 30
LARGEST_TOKEN = 2**31 - 1


def longest_repeated_suffix(text):
    """Length of the longest suffix that occurred before."""
    n = len(text)
    for length in range(n - 1, 0, -1):
        if any(text[end - length : end] == text[n - length :] for end in range(length, n)):
            return length
    return 0


def kept_end(text, length):
    """Where the suffix of this length goes on: at its latest end, one failure forgiven."""
    n = len(text)
    kept, confirmed = 0, False
    for end in range(length, n):
        if text[end - length : end] != text[n - length :]:
            continue
        if kept and text[end] == text[kept]:
            kept, confirmed = end, True
        elif confirmed:
            confirmed = False
        else:
            kept = end
    return kept


def brute_force_match(text):
    """(length, end) of what to draft from: the longest match, or a copy that agrees further."""
    agreed, copied = 0, 0
    for n in range(len(text) + 1):
        length = longest_repeated_suffix(text[:n])
        if n == len(text):
            return (agreed, copied) if agreed > length else (length, kept_end(text, length))
        if length and length >= agreed:
            agreed, copied = length, kept_end(text[:n], length)
        if agreed:
            agreed = agreed + 1 if text[copied] == text[n] else agreed // kernels.DISAGREEMENT
            copied += 1


def continuation(text, end, k):
    """What follows position `end`, going on periodically when the text is used up."""
    period = len(text) - end
    return [text[end + j % period] for j in range(k)]


def structure(pool, slot):
    """All strings' states as a set of (length, link's length, latest end, edges by length)."""
    memory = Memory(pool, slot)
    states = {state: memory.state(state) for state in (*memory.clones, *memory.prefixes)}
    stored = [columns[:3] for _, columns in memory.edges()]
    assert len(stored) == len({(source, token) for source, token, _ in stored})
    assert len(stored) == memory.header[kernels.EDGE_COUNT]
    edges = [*stored]
    for state in memory.clones:
        for token in (kernels.OLDEST_TOKEN, kernels.SECOND_TOKEN):
            if states[state][token] != kernels.NONE:
                edges.append((state, states[state][token], states[state][token + 1]))
    edges += [(at, states[at][kernels.NEXT_TOKEN], at + 1) for at in memory.prefixes[:-1]]
    targets = {state: {} for state in states}
    for source, token, target in edges:
        targets[source][token] = target
    assert sum(map(len, targets.values())) == len(edges)

    def length(state):
        return state if state >= 0 else states[state][kernels.CLONE_LENGTH]

    return {
        (
            state if state >= 0 else "clone", length(state),
            columns[kernels.LINK] if columns[kernels.LINK] >= 0 else "clone",
            length(columns[kernels.LINK]), columns[kernels.LATEST],
            tuple(sorted((token, length(target)) for token, target in targets[state].items())),
        )
        for state, columns in states.items()
    }  # fmt: skip


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


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(texts(), st.integers(1, 8))
def test_match_and_draft_are_those_of_the_rule(text, k):
    pool = AutomatonPool(max_link_updates=UNLIMITED)
    slot = pool.open()
    for n in range(1, len(text) + 1):
        tokens = draft(pool, slot, text, n, k)
        length, end = brute_force_match(text[:n])
        assert pool.match(slot) == (length, end if length else 0)
        assert tokens == (continuation(text[:n], end, k) if length else [])


@settings(max_examples=150, deadline=None)
@given(texts(), st.integers(1, 8), st.integers(1, 8))
def test_bounded_link_updates_keep_the_length_and_a_true_occurrence(text, max_link_updates, k):
    pool = AutomatonPool(max_link_updates=max_link_updates)
    slot = pool.open()
    for n in range(1, len(text) + 1):
        tokens = draft(pool, slot, text, n, k)
        length, end = pool.match(slot)
        longest = longest_repeated_suffix(text[:n])
        assert length >= longest
        if length == 0:
            assert tokens == []
            continue
        assert 0 < end < n
        assert length > longest or text[end - length : end] == text[n - length : n]
        assert tokens == continuation(text[:n], end, k)


@settings(max_examples=100, deadline=None)
@given(texts(), st.data())
def test_chunking_changes_nothing(text, data):
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    one_by_one = AutomatonPool()
    chunked = AutomatonPool()
    a, b = one_by_one.open(), chunked.open()
    for n in range(len(text) + 1):
        read(one_by_one, a, text, n)
    for n in [*cuts, len(text)]:
        read(chunked, b, text, n)
    assert structure(one_by_one, a) == structure(chunked, b)


@settings(max_examples=100, deadline=None)
@given(texts(), texts())
def test_a_rebuilt_automaton_keeps_nothing_of_its_first_text(first, second):
    pool, fresh = AutomatonPool(), AutomatonPool()
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
        ([2, 8, 3, 2, 8, 4, 2, 9, 5, 2], [8, 4, 2, 9, 5]),  # confirmed, and failed only once
        ([2, 8, 3, 2, 8, 4, 2, 9, 5, 2, 9, 6, 2], [9, 6, 2, 9, 6]),  # confirmed, failed twice
        ([1, 2, 3, 4, 5, 7, 1, 2, 3, 8], [5, 7, 1, 2, 3]),  # 8 in place of 4
        ([1, 2, 3], []),
        ([4], []),
        ([], []),
        ([1, 1 << 30, LARGEST_TOKEN, 1, 1 << 30], [LARGEST_TOKEN, 1, 1 << 30, LARGEST_TOKEN, 1]),
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
    pool = AutomatonPool()
    slot = pool.open()
    started = time.perf_counter()
    read(pool, slot, text, LONG)
    # 3-90 ms; a step whose cost grows with the text would need minutes.
    assert time.perf_counter() - started < 5
    assert pool.nbytes / LONG < 110
    length, end = pool.match(slot)
    # Strings search fast; ids are moved beyond the surrogates.
    string = "".join(map(chr, (text + 0xE000).tolist()))
    assert string.find(string[LONG - length - 1 :], 0, LONG - 1) == -1
    if string[end - length : end] != string[LONG - length :]:  # a copy that agrees but for a token
        assert name == "one run, then another"
        assert string[end - LONG // 3 : end] == string[LONG - LONG // 3 :]


def test_many_branching_edges_survive_growth():
    tokens = np.random.default_rng(2).permutation(5000) * 7919 % LARGEST_TOKEN
    text = np.concatenate([tokens, [3], tokens[::-1], [5]]).astype(np.int32)
    pool = AutomatonPool()
    slot = pool.open()
    for n in range(1, len(text) + 1, 97):
        read(pool, slot, text, n)
    # Any earlier token, asked for again, is found through the root's 5000 edges.
    for i in (0, 1, 2500, 4998):
        probe = np.append(text, tokens[i]).astype(np.int32)
        other = pool.open()
        assert draft(pool, other, probe, len(probe), 1) == [text[10000 - i + 1]]
        pool.close(other)


def brute_force_match_among(texts, own):
    """Length of the longest suffix of texts[own] that something followed, in any of the texts."""
    n = len(texts[own])
    for length in range(n, 0, -1):
        suffix = texts[own][n - length :]
        for text in texts:
            for start in range(len(text) - length):
                if text[start : start + length] == suffix:
                    return length
    return 0


def is_justified(texts, own, tokens):
    """Whether each drafted token followed, somewhere, the longest suffix up to it that goes on."""
    for j, token in enumerate(tokens):
        so_far = texts[own] + tokens[:j]
        length = brute_force_match_among([*texts, so_far], len(texts))
        # What was drafted is not known text, and nothing follows it in the copy just compared.
        while length and not goes_on(texts, so_far[len(so_far) - length :]):
            length -= 1
        if not goes_on(texts, [*so_far[len(so_far) - length :], token], 0):
            return False
    return True


def is_copied(texts, own, tokens):
    """Whether a text has the drafted tokens one after the other; its own may be gone around."""
    return goes_on(texts, tokens, 0) or any(
        texts[own][-period:] == tokens[:period] and tokens[period:] == tokens[:-period]
        for period in range(1, len(tokens))
    )


def length_and_state(pool, slot):
    """Of a match; a copy has no state."""
    (match,) = matches_of(pool, slot)
    return match[kernels.MATCH_LENGTH], match[kernels.MATCH_STATE]


def goes_on(texts, string, at_least=1):
    """Whether a string occurs in a text with so many tokens behind it."""
    size = len(string)
    return any(
        text[start : start + size] == string
        for text in texts
        for start in range(len(text) - size - at_least + 1)
    )


@st.composite
def families(draw):
    """Texts that begin alike and then copy from themselves and each other, and how they grow."""
    alphabet = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True))
    prompt = draw(st.lists(st.sampled_from(alphabet), max_size=6))
    texts = [list(prompt) for _ in range(draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(1, 8))):
        text = draw(st.sampled_from(texts))
        text += draw(st.lists(st.sampled_from(alphabet), max_size=3))
        source = draw(st.sampled_from(texts))
        start = draw(st.integers(0, len(source)))
        text += source[start : start + draw(st.integers(0, 9))]
    turns = draw(
        st.lists(st.tuples(st.integers(0, len(texts) - 1), st.integers(1, 5)), max_size=40)
    )
    return texts, turns


@settings(max_examples=400, deadline=None)
@given(families(), st.sampled_from([1, 8, UNLIMITED]), st.integers(1, 6), st.booleans())
def test_texts_that_share_an_automaton_find_each_other(family, max_link_updates, k, closing):
    texts, turns = family
    pool = AutomatonPool(max_link_updates=max_link_updates)
    automaton = pool.create()
    slots = [pool.open(automaton) for _ in texts]
    read_so_far = [0] * len(texts)
    turns = turns + [(number, 1 << 20) for number in range(len(texts))]
    for number, step_length in turns:
        read_so_far[number] = min(read_so_far[number] + step_length, len(texts[number]))
        known = [text[:n] for text, n in zip(texts, read_so_far, strict=True)]
        row = texts[number] or [0]
        tokens = draft(pool, slots[number], row, read_so_far[number], k)
        length, state = length_and_state(pool, slots[number])
        expected = brute_force_match_among(known, number)
        if length and not state:
            assert is_copied(known, number, tokens)
            if max_link_updates == UNLIMITED:
                assert length > expected
            continue
        if max_link_updates == UNLIMITED:
            assert length == expected
        assert length <= expected
        assert bool(tokens) == bool(length) and len(tokens) <= k
        if max_link_updates == UNLIMITED:
            assert is_justified(known, number, tokens)
            assert len(tokens) in (0, k) or not goes_on(known, tokens[-1:])
    if closing:
        for slot in slots:
            pool.close(slot)
        assert pool.nbytes_of_automaton(automaton) == pool.nbytes
        pool.destroy(automaton)
        assert pool.nbytes == 0


def test_a_shared_automaton_takes_many_texts_in_lock_step():
    rng = np.random.default_rng(5)
    common = rng.integers(0, 50, 3000)
    texts = [np.concatenate([common[:40], common[i * 7 :]]).astype(np.int32) for i in range(9)]
    pool = AutomatonPool()
    automaton = pool.create()
    slots = [pool.open(automaton) for _ in texts]
    width = min(map(len, texts))
    rows = np.stack([text[:width] for text in texts])
    for n in range(1, width, 11):
        draft_rows(pool, slots, rows, [n] * len(texts))
    # All but the one that is furthest ahead in the common text find more than a thousand tokens.
    lengths = matches_of(pool, *slots)[:, kernels.MATCH_LENGTH]
    assert (np.sort(lengths)[1:] > 1000).all()


def confirmed(pool, slot):
    (match,) = matches_of(pool, slot)
    assert match[kernels.MATCH_LENGTH] == 2
    return match[kernels.MATCH_CONFIRMED]


def test_a_match_is_confirmed_by_a_second_witness():
    text = [1, 2, 3, 10, 11, 1, 2, 3, 12, 13, 14, 1, 2, 4, 15, 16, 17, 1, 2]
    pool = AutomatonPool()
    slot = pool.open()
    read(pool, slot, text, 7)
    assert confirmed(pool, slot) == 0, "3 followed once"
    read(pool, slot, text, 13)
    assert confirmed(pool, slot) == 1, "twice running"
    read(pool, slot, text, len(text))
    assert confirmed(pool, slot) == 0, "not after a failure"


def test_a_match_in_a_shared_automaton_is_confirmed_when_two_texts_went_on_from_it():
    pool = AutomatonPool()
    automaton = pool.create()
    slots = [pool.open(automaton) for _ in range(3)]
    read(pool, slots[0], [9, 1, 2, 3], 4)
    read(pool, slots[1], [8, 1, 2], 3)
    assert confirmed(pool, slots[1]) == 0
    read(pool, slots[1], [8, 1, 2, 3], 4)
    read(pool, slots[2], [7, 1, 2], 3)
    assert confirmed(pool, slots[2]) == 1


def occurs_and_goes_on(texts, suffix):
    """Whether something follows the string in one of the texts."""
    return any(0 <= text.find(suffix) < len(text) - len(suffix) for text in texts)


@pytest.mark.parametrize("seed", range(3))
def test_long_texts_that_share_an_automaton(seed):
    rng = np.random.default_rng(seed)
    alphabet = (3, 40, 2000)[seed]
    texts = [list(map(int, rng.integers(0, alphabet, 30)))] * 5
    texts = [text.copy() for text in texts]
    while min(map(len, texts)) < 6000:
        text = texts[rng.integers(0, 5)]
        text += rng.integers(0, alphabet, rng.integers(0, 5)).tolist()
        source = texts[rng.integers(0, 5)]
        start = rng.integers(0, len(source))
        text += source[start : start + rng.integers(1, 60)]
    pool = AutomatonPool()
    automaton = pool.create()
    slots = [pool.open(automaton) for _ in texts]
    known = [0] * 5
    turn = 0
    while min(known) < 6000:
        number = int(rng.integers(0, 5))
        known[number] = min(known[number] + int(rng.integers(1, 30)), len(texts[number]))
        tokens = draft(pool, slots[number], texts[number], known[number], 4)
        turn += 1
        if turn % 20:
            continue
        # Strings search fast; ids are moved beyond the surrogates.
        strings = [
            "".join(chr(token + 0xE000) for token in text[:n])
            for text, n in zip(texts, known, strict=True)
        ]
        length, state = length_and_state(pool, slots[number])
        if length and not state:  # a copy
            continue
        mine = strings[number]
        assert not occurs_and_goes_on(strings, mine[len(mine) - length - 1 :])
        if length:
            match = mine[len(mine) - length :]
            assert any(match + chr(tokens[0] + 0xE000) in text for text in strings)
    assert turn > 300
