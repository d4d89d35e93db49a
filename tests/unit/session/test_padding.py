import numpy as np
import pytest

from sam_rollout.core.limits import Limits
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.session.padding import DraftPadding, GraphOf
from tests.unit.drafting.texts import int32

K, MAX_ROWS, MAX_LEN = 3, 6, 20
BUDGET = 1024
LIMITS = Limits(MAX_ROWS, MAX_LEN, max_batched_tokens=BUDGET, k=K)
# Whether steps are filled up while the gate is closed, and while it is open.
NO, DRAFTING, EVERY = [False, False], [False, True], [True, True]


def graphs(full_up_to: int, otherwise: str) -> GraphOf:
    return lambda tokens, uniform: "FULL" if uniform and tokens <= full_up_to else otherwise


def applied(padding: DraftPadding) -> list[list[bool]]:
    return [
        [padding.applies(n, is_open) for is_open in (False, True)] for n in range(1, MAX_ROWS + 1)
    ]


@pytest.mark.parametrize(
    ("setting", "graph_of", "expected"),
    [
        ("auto", graphs(BUDGET, "NONE"), [EVERY] * MAX_ROWS),
        ("auto", graphs(BUDGET, "PIECEWISE"), [DRAFTING] * MAX_ROWS),
        ("auto", graphs(BUDGET, "FULL"), [NO] * MAX_ROWS),
        ("auto", graphs(16, "NONE"), [EVERY] * 4 + [NO] * 2),
        ("auto", graphs(0, "NONE"), [NO] * MAX_ROWS),
        ("never", graphs(BUDGET, "NONE"), [NO] * MAX_ROWS),
        ("always", graphs(0, "NONE"), [EVERY] * MAX_ROWS),
    ],
)
def test_what_is_filled_up(setting, graph_of, expected):
    assert applied(DraftPadding(setting, graph_of, LIMITS)) == expected


@pytest.mark.parametrize("setting", ["auto", "always"])
def test_filling_never_pushes_requests_out_of_a_step(setting):
    limits = LIMITS._replace(max_batched_tokens=2 * (1 + K) + 3)
    padding = DraftPadding(setting, graphs(BUDGET, "NONE"), limits)
    assert applied(padding) == [EVERY] * 2 + [NO] * 4


def padding(graph_of: GraphOf) -> DraftPadding:
    return DraftPadding("auto", graph_of, LIMITS)


def test_a_gate_matters_only_where_drafting_steps_are_filled_up():
    for otherwise, closed in (("NONE", True), ("PIECEWISE", False)):
        some = padding(graphs(2 * (1 + K), otherwise))
        assert [some.applies(rows, gate_open=True) for rows in (1, 2, 3)] == [True, True, False]
        found = [some.applies(rows, gate_open=False) for rows in (1, 2, 3)]
        assert found == [closed, closed, False]


def fill_up(drafts: list[list[int]], lengths: list[int], decoding: list[bool]):
    token_ids = np.arange(MAX_LEN) + 10 * np.arange(MAX_ROWS)[:, None] + 1
    batch = DraftBatch(LIMITS)
    batch.tokens[:] = 999
    batch.clear(len(drafts))
    for row, draft in enumerate(drafts):
        batch.tokens[row, : len(draft)] = draft
        batch.counts[row] = len(draft)
    padding(graphs(BUDGET, "NONE")).fill_up(
        batch, token_ids.astype(np.int32), int32(*lengths), np.array(decoding)
    )
    assert batch.pending and batch.length[: len(drafts)].tolist() == lengths
    return batch.to_lists(), batch.filling[: len(drafts)].tolist()


def test_every_decoding_row_gets_k_tokens_its_last_one_after_its_draft():
    filled, filling = fill_up([[], [71], [81, 82, 83]], [4, 5, 6], [True] * 3)
    assert filled == [[4, 4, 4], [71, 15, 15], [81, 82, 83]]
    assert filling == [3, 2, 0]


def test_held_back_tokens_fill_first_and_are_still_judged():
    batch = DraftBatch(LIMITS)
    batch.clear(1)
    batch.pending = True
    batch.tokens[0, 0], batch.held_back[0], batch.source[0] = 7, 1, 0
    text = np.array([[5, 6, 7, 6, 9, 0]], np.int32)
    two = np.array([2], np.int32)
    padding(graphs(BUDGET, "NONE")).fill_up(batch, text, two, np.ones(1, bool))
    assert batch.to_lists() == [[7, 6, 6]]
    verified = batch.verify(text, two + 3, np.array([3], np.int32))
    assert (verified.drafted[0], verified.filling[0], verified.source[0]) == (0, 3, 0)
    assert (verified.judged[0], verified.right[0]) == (1, 1)


def test_prompts_that_are_still_computed_get_none():
    filled, filling = fill_up([[], []], [4, 5], [False, True])
    assert filled == [[], [15, 15, 15]]
    assert filling == [0, 3]


def test_no_more_than_the_engine_would_schedule_near_its_longest_text():
    room = {MAX_LEN - 5: 3, MAX_LEN - 4: 3, MAX_LEN - 3: 2, MAX_LEN - 2: 1, MAX_LEN - 1: 0}
    filled, filling = fill_up([[]] * 5, list(room), [True] * 5)
    assert filling == list(room.values()) == list(map(len, filled))
    assert fill_up([[71, 72]], [MAX_LEN - 2], [True]) == ([[71, 72]], [0]), "drafts stay as given"
