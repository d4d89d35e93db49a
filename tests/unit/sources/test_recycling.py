import numpy as np
import pytest

from sam_rollout.automaton import interface
from sam_rollout.core.limits import UNKNOWN_VOCABULARY
from sam_rollout.sources.contract import Limits, Scored
from sam_rollout.sources.recycling import SOURCE, RecyclingSourceConfig, TokenRecycling
from tests.unit.drafting.texts import drafter_of, drive, int32, rows_of

VOCABULARY, MAX_ROWS, MAX_LENGTH = 50, 4, 64
ON = RecyclingSourceConfig(enabled=True)


@pytest.fixture
def source():
    return TokenRecycling(Limits(MAX_ROWS, MAX_LENGTH, VOCABULARY))


def make_drafter(*names):
    return drafter_of(*names, max_rows=MAX_ROWS, longest=MAX_LENGTH, vocabulary=VOCABULARY)


def draft(drafter, *texts):
    names = [f"request {row}" for row in range(len(texts))]
    return drive(drafter, names, *rows_of(texts, MAX_LENGTH)).to_lists()


def hear(listener, tokens, likeliest, widths=()):
    widths = int32(*widths or [1] * len(tokens))
    names = [f"request {row}" for row in range(len(widths))]
    positions = np.zeros(len(tokens), np.int32)
    likeliest = int32(*likeliest)
    listener.hear(Scored(names, widths, int32(*tokens), positions, positions, likeliest, None))


def test_what_fills_a_step_up_tells_nothing():
    drafter = make_drafter("recycling")
    hear(drafter, [1, 2, 1, 1, 5, 6, 5], [2, 3, 8, 8, 6, 7, 9], widths=[4, 3])
    assert draft(drafter, [1], [5])[0] == [2, 3] and draft(drafter, [5], [1])[0] == [6, 7]


def test_a_chain_of_the_likeliest_tokens_is_drafted():
    drafter = make_drafter("recycling")
    assert draft(drafter, [7, 1]) == [[]], "nothing was heard"
    hear(drafter, [1, 2, 3, 9], [2, 3, 4, 9])
    assert draft(drafter, [7, 1], [8, 3], [1, 9], [5]) == [[2, 3, 4], [4], [9, 9, 9], []]
    hear(drafter, [2], [5])
    assert draft(drafter, [7, 1, 1])[0] == [2, 5], "the newest counts"


def test_a_longer_suffix_of_the_text_outvotes_it():
    drafter = make_drafter("own", "recycling")
    hear(drafter, [1, 6], [9, 7])
    text = [1, 2, 3, 4, 5, 6] * 4 + [1]
    assert draft(drafter, text, [8, 6]) == [[2, 3, 4], [7]]


def test_tokens_outside_the_vocabulary_are_passed_over(source):
    hear(source, [-1, VOCABULARY, 3, 4], [1, 1, VOCABULARY, -1])
    tokens, lengths = rows_of([[3], [VOCABULARY + 5], [4]], MAX_LENGTH)
    places = np.zeros((MAX_ROWS, interface.PLACE_WIDTH), np.int64)
    source.locate(tokens, lengths, np.array([True, True, False]), places[:3])
    kinds = [interface.FOLLOWERS, interface.FOLLOWERS, interface.NOWHERE]
    assert places[:3, interface.PLACE_KIND].tolist() == kinds
    assert places[:3, interface.PLACE_STATE].tolist() == [3, VOCABULARY + 5, 4]
    assert (places[:3, interface.PLACE_LENGTH] == VOCABULARY).all()
    assert draft(make_drafter("recycling"), [3], [VOCABULARY + 5]) == [[], []]


def test_it_holds_one_table_whatever_it_hears(source):
    for _ in range(3):
        hear(source, range(VOCABULARY), range(VOCABULARY))
    assert source.usage().bytes == 8 * VOCABULARY


def test_without_a_known_vocabulary_there_is_none():
    assert SOURCE.make(ON, Limits(MAX_ROWS, MAX_LENGTH, UNKNOWN_VOCABULARY), None) is None
