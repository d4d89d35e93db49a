import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.automaton import kernels
from sam_rollout.automaton.continuations import LENGTHS, LEVELS
from sam_rollout.automaton.interface import CERTAIN, PLACE_HEADER, PLACE_KIND, PLACE_LENGTH, READY
from sam_rollout.automaton.pool import AutomatonPool
from tests.unit.automaton.pools import Vote, draft, followed, places_of, read, votes_at, votes_of

UNLIMITED = 1 << 30
LARGEST_TOKEN = 2**31 - 1
OTHER, SIBLING, OWN = range(3)
TOKEN_OF = {"a": 0, "b": 1 << 30, "c": LARGEST_TOKEN, "d": 5}


class Reference:
    def __init__(self):
        self.prefixes = {""}  # prefixes of all texts
        self.noted = []  # (text so far, new token, writer), oldest first
        self.open_runs = {}  # text that ends in new tokens -> writer of the first of them

    def knows(self, string):
        return any(string in prefix for prefix in self.prefixes)

    def append(self, text, token, writer):
        """Read one more token of a text; note it if the text with the token is a new string."""
        if not self.knows(text + token):
            writer = self.open_runs.pop(text, writer)
            self.open_runs[text + token] = writer
            self.noted.append((text, token, writer))
        self.prefixes.add(text + token)

    def longest(self, text):
        return next(text[i:] for i in range(len(text) + 1) if self.knows(text[i:]))

    def _count(self, string):
        times = sum(text.endswith(string) for text, _, _ in self.noted)
        return min(times, kernels.LARGEST_COUNT)

    def _writer(self, string):
        on = [writer for text, _, writer in self.noted if text.endswith(string)]
        first = (w for text, token, w in self.noted if (text + token).endswith(string))
        return on[-1] if on else next(first)

    def levels(self, suffix):
        found = []
        while suffix and len(found) < LEVELS:
            tokens = [token for text, token, _ in self.noted if text.endswith(suffix)]
            if tokens:
                found.append((suffix, tokens))
            places = self._places(suffix)
            while suffix and self._places(suffix) == places:
                suffix = suffix[1:]
        return found

    def _is_prefix(self, string):
        places = self._places(string)
        added = (text + token for text, token, _ in self.noted)
        return any(one.endswith(string) and self._places(one) == places for one in added)

    def _places(self, suffix):
        return sum(prefix.endswith(suffix) for prefix in self.prefixes)

    def check(self, suffix, votes, relation, texts):
        """Check the votes after a suffix.

        Args:
            suffix, votes: The suffix, and the pool's votes after it.
            relation: Maps each writer to its class.
            texts: Number of texts in the automaton.
        """
        votes = list(votes)
        for string, tokens in self.levels(suffix):
            latest, counted = tokens[-1], {token: tokens.count(token) for token in tokens}
            went_on = {token: max(self._count(string + token), 1) for token in tokens}
            best = next(token for token in tokens if TOKEN_OF[token] == votes[0].token)
            if self._is_prefix(string):
                allowed = [went_on[best]]
                assert best in (tokens[0], latest) and went_on[best] >= went_on[latest]
            else:
                most = counted[best] if texts == 1 else max(counted[best], went_on[best] + 1)
                allowed = range(max(counted[best] - texts + 1, 1), most + 1)
                assert most >= max(counted.values()) - texts + 1
                if texts == 1 and counted[latest] == counted[best]:
                    assert best == latest
            last_writer = relation[
                next(writer for text, _, writer in self.noted[::-1] if text.endswith(string))
            ]
            expected = []
            for times in allowed:
                followed_by = {best: (times, relation[self._writer(string + best)])}
                followed_by[latest] = times if best == latest else went_on[latest], last_writer
                expected.append(
                    [
                        Vote.of(
                            TOKEN_OF[token], len(string), max(self._count(string), times), often,
                            token == latest, writer,
                        )
                        for token, (often, writer) in followed_by.items()
                    ]
                )  # fmt: skip
            size = len(expected[0])
            assert votes[:size] in expected
            del votes[:size]
        assert votes == []


@st.composite
def families(draw):
    alphabet = draw(st.sampled_from(["ab", "abc", "abcd"]))
    prompt = draw(st.text(alphabet, max_size=6))
    texts = [prompt] * draw(st.integers(1, 4))
    for _ in range(draw(st.integers(1, 8))):
        source = draw(st.sampled_from(texts))
        start = draw(st.integers(0, len(source)))
        addition = draw(st.text(alphabet, max_size=3)) + source[start:][: draw(st.integers(0, 9))]
        texts[draw(st.integers(0, len(texts) - 1))] += addition
    turn = st.tuples(st.integers(0, len(texts) - 1), st.integers(1, 9))
    turns = draw(st.lists(turn, max_size=15)) + [(number, 1 << 20) for number in range(len(texts))]
    return texts, turns


def grown(pool, family, shared):
    """Read a family's texts piece by piece; yield (text's number, slot, text so far, reference)."""
    texts, turns = family
    automaton, common = pool.create() if shared else None, Reference()
    slots = [pool.open(automaton, group=number % 2) for number in range(len(texts))]
    references = [common if shared else Reference() for _ in texts]
    lengths = [0] * len(texts)
    for number, size in turns:
        text, before = texts[number], lengths[number]
        lengths[number] = after = min(before + size, len(text))
        for n in range(before, after):
            references[number].append(text[:n], text[n], number)
        read(pool, slots[number], [TOKEN_OF[letter] for letter in text] or [0], after)
        yield number, slots[number], text[:after], references[number]


@settings(max_examples=150, deadline=None)
@given(families(), st.booleans(), st.text("abcd", max_size=4))
def test_places_and_votes_are_those_of_the_reference(family, shared, drafted):
    pool = AutomatonPool(max_link_updates=UNLIMITED)
    for number, slot, text, reference in grown(pool, family, shared):
        (place,) = places_of(pool, slot)
        if not text:
            assert votes_at(place) == []
            continue
        relation = [SIBLING if other % 2 == number % 2 else OTHER for other in range(4)]
        relation[number] = OWN
        assert place[PLACE_LENGTH] == len(text)
        texts = len(family[0]) if shared else 1
        reference.check(text, votes_at(place), relation, texts)
        suffix = text
        for letter in drafted:
            place, suffix = followed(place, TOKEN_OF[letter]), reference.longest(suffix + letter)
            assert place[PLACE_LENGTH] == len(suffix)
            reference.check(suffix, votes_at(place), relation, texts)


@settings(max_examples=100, deadline=None)
@given(families(), st.booleans(), st.integers(1, 3))
def test_bounded_link_updates_vote_for_what_did_follow(family, shared, max_link_updates):
    pool = AutomatonPool(max_link_updates=max_link_updates)
    for _, slot, text, reference in grown(pool, family, shared):
        votes = votes_of(pool, slot)
        assert len(votes) <= 4 and (votes or not reference.levels(text))
        for vote in votes:
            suffix = text[-(1, *LENGTHS)[vote.length] :]
            assert any(TOKEN_OF[t] == vote.token and reference.knows(suffix + t) for t in "abcd")
    for slot in range(len(pool)):
        pool.close(slot)
    if shared:
        pool.destroy(0)
    assert pool.nbytes == 0


def test_frequent_suffixes_are_counted():
    pool = AutomatonPool(max_link_updates=UNLIMITED)
    slot, text = pool.open(), [1, 2] * 400 + [1, 3] * 30 + [4, 1]
    read(pool, slot, text, len(text))
    assert votes_of(pool, slot) == [
        Vote.of(2, 1, 430, 400, False, OWN),
        Vote.of(3, 1, 430, 30, True, OWN),
    ]


def test_a_ready_draft_votes_where_it_is_followed_by_how_certain_it_is():
    drafted = np.array([(4, CERTAIN), (5, CERTAIN // 3), (6, 0)], np.int32)
    place = np.zeros(5, np.int64)
    place[[PLACE_KIND, PLACE_HEADER, PLACE_LENGTH]] = READY, drafted.ctypes.data, len(drafted)
    for length, (token, certainty) in enumerate(drafted.tolist(), start=1):
        votes = certainty / CERTAIN
        assert votes_at(place) == [Vote.of(token, length, 1, votes, False, OTHER)]
        assert votes_at(followed(place, token + 1)) == []
        place = followed(place, token)
    assert votes_at(place) == [] and votes_at(followed(place, 6)) == []


def strings_of(texts):
    return ["".join(chr(token + 0xE000) for token in text) for text in texts]


def check_longest(votes, strings, mine):
    """Check that the first vote comes after the longest suffix that some string continues."""
    low, high = 0, len(mine)
    while low < high:
        middle = (low + high + 1) // 2
        suffix = mine[len(mine) - middle :]
        goes_on = any(0 <= one.find(suffix) < len(one) - middle for one in strings)
        low, high = (middle, high) if goes_on else (low, middle - 1)
    assert [vote.length for vote in votes[:1]] == [sum(low >= n for n in LENGTHS)][: low > 0]
    if low:
        followed_by = mine[len(mine) - low :] + chr(votes[0].token + 0xE000)
        assert any(followed_by in one for one in strings)


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
    # Reading the text takes 3-90 ms. If a token's cost grew with the text, this would take minutes.
    assert time.perf_counter() - started < 5
    assert pool.nbytes / LONG < 110
    (string,) = strings_of([text])
    votes = votes_of(pool, slot)
    assert all(vote.writer == OWN for vote in votes)
    check_longest(votes, [string], string)


def test_many_branching_edges_survive_growth():
    tokens = np.random.default_rng(2).permutation(5000) * 7919 % LARGEST_TOKEN
    text = np.concatenate([tokens, [3], tokens[::-1], [5]]).astype(np.int32)
    pool = AutomatonPool()
    slot = pool.open()
    for n in range(1, len(text) + 1, 97):
        read(pool, slot, text, n)
    for i in (0, 1, 2500, 4998):
        probe = np.append(text, tokens[i]).astype(np.int32)
        other = pool.open()
        assert draft(pool, other, probe, len(probe), 1) == [text[10000 - i + 1]]
        pool.close(other)


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
        read(pool, slots[number], texts[number], known[number])
        turn += 1
        if turn % 20 == 0:
            strings = strings_of(text[:n] for text, n in zip(texts, known, strict=True))
            check_longest(votes_of(pool, slots[number]), strings, strings[number])
    assert turn > 300
