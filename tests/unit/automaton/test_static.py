"""Static automata against a brute-force matcher over the documents themselves."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.automaton.continuations import LEVELS
from sam_rollout.automaton.interface import (
    NOWHERE,
    PLACE_KIND,
    PLACE_LENGTH,
    PLACE_WIDTH,
    STATIC,
)
from sam_rollout.automaton.static import ARRAYS, SEPARATOR, build, join
from sam_rollout.automaton.static_match import _MAX_STEPS_BACK, WINDOW, StaticMatcher
from tests.unit.automaton.pools import Vote, draft_from, followed, int32, votes_at

LARGEST_TOKEN = SEPARATOR - 1


def ends_of(documents, suffix):
    """(document, position) behind every occurrence of `suffix`, in the order of the text."""
    n = len(suffix)
    return [
        (d, end)
        for d, document in enumerate(documents)
        for end in range(n, len(document) + 1)
        if document[end - n : end] == suffix
    ]


def longest(documents, text):
    """The longest suffix of a text that a document contains."""
    suffixes = (text[start:] for start in range(len(text)))
    return next((suffix for suffix in suffixes if ends_of(documents, suffix)), [])


def expected_votes(documents, suffix):
    """The token that mostly follows a suffix, and the next shorter one that occurs elsewhere."""
    votes, states = [], 0
    while suffix and len(votes) < LEVELS and states < _MAX_STEPS_BACK:
        states += 1
        ends = ends_of(documents, suffix)
        votes += [
            Vote.of(token, len(suffix), 1, 1, True, 0) for token in likeliest(documents, ends, 1)
        ]
        while suffix and ends_of(documents, suffix) == ends:
            suffix = suffix[1:]
    return votes


def likeliest(documents, ends, k):
    """Token by token the one that follows most often, of equals the one that followed last."""
    draft = []
    while len(draft) < k:
        following = {}
        for d, end in ends:
            if end < len(documents[d]):
                following.setdefault(documents[d][end], []).append((d, end + 1))
        if not following:
            break
        token = max(following, key=lambda t: (len(following[t]), following[t][-1]))
        draft.append(token)
        ends = following[token]
    return draft


class Row:
    """One request, matched alone."""

    def __init__(self, automaton):
        self.matcher = StaticMatcher(1)
        self.matcher.rearrange(np.array([-1]))
        self.matcher.attach(0, automaton)

    def __call__(self, text, length):
        """Where the row stands, int64[PLACE_WIDTH]; valid as long as this object."""
        row, places = np.array([*text, 0], np.int32)[None], np.full((1, PLACE_WIDTH), -7)
        self.matcher.place(row, int32(length), np.ones(1, bool), places)
        return places[0]

    def draft(self, text, length, k=4):
        """Length of the longest suffix, and what is drafted after it."""
        place = self(text, length)
        return (int(place[PLACE_LENGTH]), draft_from(place, k)) if place[PLACE_KIND] else (0, [])


@st.composite
def documents_and_text(draw):
    """A few documents over few tokens, and a text that copies from them."""
    alphabet = draw(st.lists(st.integers(0, LARGEST_TOKEN), min_size=1, max_size=4, unique=True))
    token = st.sampled_from(alphabet)
    documents = []
    for _ in range(draw(st.integers(1, 5))):
        document = draw(st.lists(token, max_size=12)) * draw(st.integers(1, 3))
        if documents and documents[-1]:
            start = draw(st.integers(0, len(documents[-1]) - 1))
            document += documents[-1][start : start + draw(st.integers(0, 12))]
        documents.append(document)
    text = draw(st.lists(token, max_size=4))
    for _ in range(draw(st.integers(0, 4))):
        source = draw(st.sampled_from(documents))
        start = draw(st.integers(0, len(source)))
        text += source[start : start + draw(st.integers(0, 12))]
        text += draw(st.lists(token | st.just(5), max_size=2))
    return documents, text


@settings(max_examples=80, deadline=None)
@given(documents_and_text(), st.data())
def test_places_and_votes_are_those_of_brute_force(case, data):
    documents, text = case
    row = Row(build(join(documents)))
    for length in range(len(text) + 1):
        if length < len(text) and data.draw(st.booleans()):  # however the text is cut into calls
            continue
        place = row(text, length)
        if not any(documents):
            assert place[PLACE_KIND] == NOWHERE
            continue
        suffix = longest(documents, text[:length])
        for token in [*data.draw(st.lists(st.sampled_from([*documents[-1], 5]), max_size=3)), None]:
            assert place[PLACE_KIND] == STATIC and place[PLACE_LENGTH] == len(suffix)
            assert votes_at(place) == expected_votes(documents, suffix)
            if token is not None:
                place, suffix = followed(place, token), longest(documents, [*suffix, token])


def test_a_long_gap_is_read_from_its_last_tokens():
    rng = np.random.default_rng(0)
    document = rng.integers(0, 3, 400).tolist()
    row = Row(build(join([document])))
    assert row.draft(document, 300) == (WINDOW, document[300:304])
    assert row.draft(document, 301) == (WINDOW + 1, document[301:305])
    assert row.draft(document, 301 + WINDOW)[0] == 2 * WINDOW + 1  # just no gap
    assert row.draft(document, 20)[0] == 20  # another text under the same id


def test_the_most_frequent_continuation_is_drafted_and_the_latest_of_equals():
    row = Row(build(join([[1, 2, 3], [1, 2, 3], [1, 2, 4]])))
    assert row.draft([1, 2], 2, k=1) == (2, [3])
    row = Row(build(join([[1, 2, 3], [1, 2, 4]])))
    assert row.draft([1, 2], 2, k=1) == (2, [4])


def test_copies_end_with_their_document_and_matches_do_not_cross_two():
    row = Row(build(join([[1, 2, 3], [4, 5]])))
    assert row.draft([1, 2], 2, k=4) == (2, [3])
    assert row.draft([1, 2, 3], 3) == (3, [])
    assert row.draft([1, 2, 3, 4], 4) == (1, [5])
    assert row.draft([3, SEPARATOR, 4], 3) == (1, [5])


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_automaton_of_nothing_matches_nothing(documents):
    assert Row(build(join(documents))).draft([1, 2, 3], 3) == (0, [])


def test_refused_documents():
    for bad in ([1, -1], [SEPARATOR], [2**40]):
        with pytest.raises(ValueError, match="token ids must lie in"):
            join([[0], bad])


def test_tokens_beyond_the_vocabulary_are_not_drafted():
    automaton = build(join([[1, 2, 9, 3]]), vocabulary=9)
    assert Row(automaton).draft([1], 1) == (1, [2])


@pytest.mark.parametrize(
    "text",
    [
        np.zeros(60_000, int),
        np.arange(60_000) % 977,
        np.random.default_rng(1).integers(0, 2, 60_000),
        np.random.default_rng(2).integers(0, 150_000, 60_000),
    ],
    ids=["all equal", "periodic", "binary", "vocabulary"],
)
def test_long_texts_are_packed_tightly(text):
    automaton = build(join([text]))
    assert automaton.nbytes / len(text) < 60
    matched, draft = Row(automaton).draft(text[-WINDOW - 1 :], WINDOW)
    assert (matched, draft[0]) == (WINDOW, text[-1])


def test_edges_of_a_state_with_many_are_found():
    tokens = np.random.default_rng(3).permutation(5000)
    row = Row(build(join([np.append(np.repeat(tokens, 2)[1:], tokens[0])])))
    for token in tokens[1:2000:37].tolist():
        assert row.draft([token, token], 2, k=1)[0] == 2


def test_rows_keep_their_cursors_when_the_batch_changes():
    document = list(range(10, 40))
    automaton, other = build(join([document])), build(join([[7, 8, 9, 7, 7]]))
    matcher = StaticMatcher(3)
    matcher.rearrange(np.array([-1, -1]))
    matcher.attach(0, automaton)
    matcher.attach(1, other)
    texts = np.zeros((3, 40), np.int32)
    texts[0, :20], texts[1, :2] = document[:20], [7, 8]
    places = np.zeros((3, PLACE_WIDTH), np.int64)
    matcher.place(texts, int32(20, 2), np.ones(2, bool), places)
    assert places[:, PLACE_LENGTH].tolist() == [20, 2, 0]
    matcher.rearrange(np.array([1, -1, 0]))
    assert [matcher.automaton(row) for row in range(3)] == [other, None, automaton]
    texts[[0, 2]] = texts[[1, 0]]
    texts[2, :10] = 0  # would shorten the match if it were read again
    texts[2, 20] = document[20]
    eligible = np.array([False, True, True])
    matcher.place(texts, int32(2, 20, 21), eligible, places)
    assert places[:, PLACE_KIND].tolist() == [NOWHERE, NOWHERE, STATIC]
    assert places[2, PLACE_LENGTH] == 21
    assert draft_from(places[2], 2) == document[21:23]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_damaged_arrays_draft_nonsense_at_worst(seed):
    rng = np.random.default_rng(seed)
    automaton = build(join([rng.integers(0, 4, 60), rng.integers(0, 4, 60)]), vocabulary=4)
    name = ARRAYS[seed % len(ARRAYS)]
    array = getattr(automaton, name).copy()
    hit = rng.random(len(array)) < 0.3
    limits = [(-(2**31), 2**31), (-2, len(array)), (0, 200)][seed % 3]
    array[hit] = rng.integers(*limits, hit.sum())
    row = Row(dataclasses.replace(automaton, **{name: array}))
    text = rng.integers(0, 5, 200).tolist()
    for length in range(0, 200, 3):
        matched, draft = row.draft(text, length)
        assert 0 <= matched <= length
        assert all(0 <= token < 4 for token in draft)


def test_arrays_that_do_not_fit_each_other_are_refused():
    automaton = build(join([[1, 2, 1, 3]]))
    with pytest.raises(ValueError, match="do not fit each other"):
        dataclasses.replace(automaton, link=automaton.link[:-1].copy())
    with pytest.raises(TypeError, match="text must be int32"):
        dataclasses.replace(automaton, text=automaton.text.astype(np.int64))
