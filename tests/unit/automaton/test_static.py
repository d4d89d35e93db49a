"""Static automata against a brute-force matcher over the documents themselves."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.automaton.static import ARRAYS, SEPARATOR, build, join
from sam_rollout.automaton.static_match import WINDOW, StaticMatcher
from tests.unit.automaton.pools import int32

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


def brute_force(documents, text, k, longest=WINDOW):
    """Length of the longest suffix that occurs and goes on, and the k likeliest next tokens."""
    for length in range(min(len(text), longest), 0, -1):
        ends = ends_of(documents, text[len(text) - length :])
        if any(end < len(documents[d]) for d, end in ends):
            return length, likeliest(documents, ends, k)
    return 0, []


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

    def __call__(self, text, length, k=4):
        row = np.array([*text, 0], np.int32)[None]
        lengths, counts, tokens = int32(-1), int32(-1), np.full((1, k), -7, np.int32)
        self.matcher.match(row, int32(length), np.ones(1, bool), lengths)
        self.matcher.draft(int32(k), tokens, counts)
        assert (tokens[0, counts[0] :] == -7).all()
        return int(lengths[0]), tokens[0, : counts[0]].tolist()


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


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(documents_and_text(), st.data())
def test_match_and_draft_are_those_of_brute_force(case, data):
    documents, text = case
    row = Row(build(join(documents)))
    for length in range(len(text) + 1):
        if data.draw(st.booleans()):  # however the text is cut into calls
            assert row(text, length) == brute_force(documents, text[:length], 4)
    assert row(text, len(text)) == brute_force(documents, text, 4)


def test_a_long_gap_is_read_from_its_last_tokens():
    rng = np.random.default_rng(0)
    document = rng.integers(0, 3, 400).tolist()
    row = Row(build(join([document])))
    assert row(document, 300) == (WINDOW, document[300:304])
    assert row(document, 301) == (WINDOW + 1, document[301:305])
    assert row(document, 301 + WINDOW)[0] == 2 * WINDOW + 1  # just no gap
    assert row(document, 20)[0] == 20  # another text under the same id


def test_the_most_frequent_continuation_is_drafted_and_the_latest_of_equals():
    row = Row(build(join([[1, 2, 3], [1, 2, 3], [1, 2, 4]])))
    assert row([1, 2], 2, k=1) == (2, [3])
    row = Row(build(join([[1, 2, 3], [1, 2, 4]])))
    assert row([1, 2], 2, k=1) == (2, [4])


def test_copies_end_with_their_document_and_matches_do_not_cross_two():
    row = Row(build(join([[1, 2, 3], [4, 5]])))
    assert row([1, 2], 2, k=4) == (2, [3])
    assert row([1, 2, 3], 3) == (0, [])
    assert row([1, 2, 3, 4], 4) == (1, [5])
    assert row([3, SEPARATOR, 4], 3) == (1, [5])


@pytest.mark.parametrize("documents", [[], [[]], [[], []]])
def test_an_automaton_of_nothing_matches_nothing(documents):
    assert Row(build(join(documents)))([1, 2, 3], 3) == (0, [])


def test_refused_documents():
    for bad in ([1, -1], [SEPARATOR], [2**40]):
        with pytest.raises(ValueError, match="token ids must lie in"):
            join([[0], bad])


def test_tokens_beyond_the_vocabulary_are_not_drafted():
    automaton = build(join([[1, 2, 9, 3]]), vocabulary=9)
    assert Row(automaton)([1], 1) == (1, [2])


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
    matched, draft = Row(automaton)(text[-WINDOW - 1 :], WINDOW)
    assert (matched, draft[0]) == (WINDOW, text[-1])


def test_edges_of_a_state_with_many_are_found():
    tokens = np.random.default_rng(3).permutation(5000)
    row = Row(build(join([np.append(np.repeat(tokens, 2)[1:], tokens[0])])))
    for token in tokens[1:2000:37].tolist():
        assert row([token, token], 2, k=1)[0] == 2


def test_rows_keep_their_cursors_when_the_batch_changes():
    document = list(range(10, 40))
    automaton, other = build(join([document])), build(join([[7, 8, 9, 7, 7]]))
    matcher = StaticMatcher(3)
    matcher.rearrange(np.array([-1, -1]))
    matcher.attach(0, automaton)
    matcher.attach(1, other)
    texts = np.zeros((3, 40), np.int32)
    texts[0, :20], texts[1, :2] = document[:20], [7, 8]
    lengths = np.full(2, -1, np.int32)
    matcher.match(texts, int32(20, 2), np.ones(2, bool), lengths)
    assert lengths.tolist() == [20, 2]
    matcher.rearrange(np.array([1, -1, 0]))
    assert [matcher.automaton(row) for row in range(3)] == [other, None, automaton]
    texts[[0, 2]] = texts[[1, 0]]
    texts[2, :10] = 0  # would shorten the match if it were read again
    texts[2, 20] = document[20]
    lengths = np.full(3, -1, np.int32)
    eligible = np.array([False, True, True])
    matcher.match(texts, int32(2, 20, 21), eligible, lengths)
    assert lengths.tolist() == [0, 0, 21]
    tokens, counts = np.zeros((3, 2), np.int32), np.full(3, -1, np.int32)
    matcher.draft(int32(2, 2, 0), tokens, counts)
    assert counts.tolist() == [0, 0, -1]  # rows with k = 0 are not touched


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
        matched, draft = row(text, length)
        assert 0 <= matched <= length
        assert all(0 <= token < 4 for token in draft)


def test_arrays_that_do_not_fit_each_other_are_refused():
    automaton = build(join([[1, 2, 1, 3]]))
    with pytest.raises(ValueError, match="do not fit each other"):
        dataclasses.replace(automaton, link=automaton.link[:-1].copy())
    with pytest.raises(TypeError, match="text must be int32"):
        dataclasses.replace(automaton, text=automaton.text.astype(np.int64))
