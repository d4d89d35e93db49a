import numpy as np

from sam_rollout.automaton.interface import NOWHERE, PLACE_KIND, PLACE_STATE, PLACE_WIDTH
from sam_rollout.sources.contract import Limits, Scored
from sam_rollout.sources.draws import PositionDraws
from tests.unit.drafting.texts import drafter_of, int32, rows_of, step

K, MAX_ROWS, MAX_LENGTH, VOCABULARY = 4, 3, 64, 50
LIMITS = Limits(MAX_ROWS, MAX_LENGTH, VOCABULARY, k=K)


def make_drafter():
    return drafter_of("draws", k=K, max_rows=MAX_ROWS, longest=MAX_LENGTH, vocabulary=VOCABULARY)


def scored(*steps):
    names, widths, tokens, positions, drawn = [], [], [], [], []
    for name, text, draft, draws in steps:
        assert len(draws) == len(draft) + 1
        names.append(name)
        widths.append(len(draws))
        tokens += [text[-1], *draft]
        positions += range(len(text), len(text) + len(draws))
        drawn += draws
    parents = [place - 1 for width in widths for place in range(width)]
    return Scored(
        names, int32(*widths), int32(*tokens), int32(*positions), int32(*parents), None,
        int32(*drawn),
    )  # fmt: skip


def draft(drafter, texts, heard=None):
    drafter.bind(list(texts))
    if heard is not None:
        drafter.hear(heard)
    return list(step(drafter, texts).values())


def test_draws_behind_the_first_wrong_token_are_drafted_by_position():
    drafter = make_drafter()
    assert draft(drafter, {"a": [1, 2]}) == [[]]
    # Draft token 3 is right; 9 is wrong, so 4 is sampled. 5 and 6 are drawn after 9 and 8.
    heard = scored(("a", [1, 2], [3, 9, 8], [3, 4, 5, 6]))
    assert draft(drafter, {"a": [1, 2, 3, 4]}, heard) == [[5, 6]]
    assert draft(drafter, {"a": [1, 2, 3, 4, 5]}) == [[6]]
    assert draft(drafter, {"a": [1, 2, 3, 4, 7, 7]}) == [[]], "their positions have passed"


def test_the_newest_draw_of_a_position_counts():
    drafter = make_drafter()
    heard = scored(("a", [1], [9, 9, 9], [2, 3, 4, 5]))
    assert draft(drafter, {"a": [1, 2]}, heard) == [[3, 4, 5]]
    heard = scored(("a", [1, 2], [3, 4, 5], [8, 3, 6, 7]))
    assert draft(drafter, {"a": [1, 2, 8]}, heard) == [[3, 6, 7]]


def test_draws_of_a_tree_are_of_their_depth():
    drafter = make_drafter()
    parents, depths = int32(-1, 0, 0, 1, 2, 4), [0, 1, 1, 2, 2, 3]
    heard = Scored(
        ["a"], int32(6), int32(1, 2, 3, 4, 5, 6), int32(*(1 + depth for depth in depths)), parents,
        None, int32(3, 8, 7, 11, 12, 13),
    )  # fmt: skip
    assert draft(drafter, {"a": [1, 3, 7]}, heard) == [[11, 13]]


def test_nothing_is_left_where_every_draft_token_was_right():
    drafter = make_drafter()
    heard = scored(("a", [1], [2, 3], [2, 3, 4]))
    assert draft(drafter, {"a": [1, 2, 3, 4]}, heard) == [[]]


def test_draws_follow_their_request_and_end_with_it():
    drafter = make_drafter()
    texts = {"a": [1, 2], "b": [5, 6], "c": [7, 8]}
    draft(drafter, texts)
    heard = scored(*((name, text[:1], [0, 0], [text[1], 30, 31]) for name, text in texts.items()))
    drafter.hear(heard)
    drafter.finish(["b"])
    moved = {"c": [7, 8], "b": [5, 6]}
    assert draft(drafter, moved) == [[30, 31], []]
    assert draft(drafter, {"c": [7, 8]}, scored(("b", [5], [0], [6, 9]))) == [[30, 31]]
    assert draft(drafter, {"b": [5, 6], "c": [7, 8]}) == [[], [30, 31]]
    assert draft(drafter, {"b": [5, 6]}) == [[]]
    assert draft(drafter, {"c": [7, 8]}) == [[]], "a request that left begins anew"


def test_a_row_that_is_not_eligible_stands_nowhere():
    source = PositionDraws(LIMITS)
    source.bind(["a", "b"], [None, None])
    tokens, lengths = rows_of([[3], [4, 5]], MAX_LENGTH)
    places = np.zeros((MAX_ROWS, PLACE_WIDTH), np.int64)
    source.locate(tokens, lengths, np.array([True, False]), places[:2])
    assert (places[:2, PLACE_KIND] == NOWHERE).tolist() == [False, True]
    assert places[0, PLACE_STATE] == 2


def test_tokens_that_were_not_drawn_are_passed_over():
    drafter = make_drafter()
    heard = scored(("a", [1], [9, 9, 9], [2, -1, 3, VOCABULARY]))
    assert draft(drafter, {"a": [1, 2]}, heard) == [[]]
    assert draft(drafter, {"a": [1, 2, 5]}) == [[3]], "a token outside the vocabulary ends a draft"
    drafter.hear(Scored(["a"], int32(1), int32(1), int32(1), int32(-1), int32(2), None))
    assert drafter.counters()["draft/draws_positions"] == 4
