"""Which steps are filled up, and with what; against an engine that has captured a few graphs."""

import numpy as np
import pytest

from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.session.padding import (
    DraftPadding,
    GraphOf,
    Padding,
    no_graphs,
    padding_by_rows,
)
from tests.unit.drafting.texts import int32

K, MAX_ROWS, MAX_LEN = 3, 6, 20
BUDGET = 1024
NO, DRAFTING, EVERY = Padding.NO_STEP, Padding.DRAFTING_STEPS, Padding.EVERY_STEP


def graphs(full_up_to: int, otherwise: str) -> GraphOf:
    """Full graphs for uniform steps of at most so many tokens, and what serves all other steps."""
    return lambda tokens, uniform: "FULL" if uniform and tokens <= full_up_to else otherwise


def decide(setting="auto", graph_of=no_graphs, budget=BUDGET) -> list[Padding]:
    return padding_by_rows(setting, graph_of, K, MAX_ROWS, budget)[1:].tolist()


@pytest.mark.parametrize(
    ("otherwise", "expected"), [("NONE", EVERY), ("PIECEWISE", DRAFTING), ("FULL", NO)]
)
def test_what_is_filled_up_depends_on_the_graphs_of_other_steps(otherwise, expected):
    assert decide(graph_of=graphs(BUDGET, otherwise)) == [expected] * MAX_ROWS


def test_more_requests_than_full_graphs_were_captured_for_are_left_alone():
    assert decide(graph_of=graphs(16, "NONE")) == [EVERY] * 4 + [NO] * 2


def test_an_engine_without_full_graphs_is_left_alone():
    assert decide(graph_of=graphs(0, "NONE")) == [NO] * MAX_ROWS
    assert decide() == [NO] * MAX_ROWS


def test_the_setting_decides_before_the_graphs():
    assert decide("never", graphs(BUDGET, "NONE")) == [NO] * MAX_ROWS
    assert decide("always") == [EVERY] * MAX_ROWS


@pytest.mark.parametrize("setting", ["auto", "always"])
def test_filling_never_pushes_requests_out_of_a_step(setting):
    budget = 2 * (1 + K) + 3
    expected = [EVERY] * 2 + [NO] * 4
    assert decide(setting, graphs(BUDGET, "NONE"), budget=budget) == expected


def padding(full_up_to: int, otherwise: str, budget: int = BUDGET) -> DraftPadding:
    return DraftPadding(
        "auto", graphs(full_up_to, otherwise), K, MAX_ROWS, budget, max_model_len=MAX_LEN
    )


def test_a_gate_matters_only_where_drafting_steps_are_filled_up():
    for otherwise, closed in (("NONE", True), ("PIECEWISE", False)):
        some = padding(2 * (1 + K), otherwise)
        assert [some.applies(rows, gate_open=True) for rows in (1, 2, 3)] == [True, True, False]
        found = [some.applies(rows, gate_open=False) for rows in (1, 2, 3)]
        assert found == [closed, closed, False]


def test_the_report_names_steps_and_sizes():
    assert padding(0, "NONE").describe() == "no step"
    assert not padding(0, "NONE").in_use

    def mixed(tokens: int, uniform: bool) -> str:
        """Small steps without drafts are in no graph, larger ones in graphs of pieces."""
        if uniform and tokens <= 3 * (1 + K):
            return "FULL"
        return "NONE" if tokens <= 2 else "PIECEWISE"

    both = DraftPadding("auto", mixed, K, MAX_ROWS, BUDGET, MAX_LEN)
    assert both.describe() == (
        "every step of up to 2 requests, steps that draft of up to 3 requests"
    )
    assert both.in_use


def fill_up(drafts: list[list[int]], lengths: list[int], decoding: list[bool]):
    """Text i is 10 i + 1, 10 i + 2, ... in a batch that was larger a step before."""
    token_ids = np.arange(MAX_LEN) + 10 * np.arange(MAX_ROWS)[:, None] + 1
    batch = DraftBatch(MAX_ROWS, K)
    batch.tokens[:] = 999
    batch.clear(len(drafts))
    for row, draft in enumerate(drafts):
        batch.tokens[row, : len(draft)] = draft
        batch.counts[row] = len(draft)
    padding(BUDGET, "NONE").fill_up(
        batch, token_ids.astype(np.int32), int32(*lengths), np.array(decoding)
    )
    assert batch.pending and batch.length[: len(drafts)].tolist() == lengths
    return batch.to_lists(), batch.filling[: len(drafts)].tolist()


def test_every_decoding_row_gets_k_tokens_its_last_one_after_its_draft():
    filled, filling = fill_up([[], [71], [81, 82, 83]], [4, 5, 6], [True] * 3)
    assert filled == [[4, 4, 4], [71, 15, 15], [81, 82, 83]]
    assert filling == [3, 2, 0]


def test_prompts_that_are_still_computed_get_none():
    filled, filling = fill_up([[], []], [4, 5], [False, True])
    assert filled == [[], [15, 15, 15]]
    assert filling == [0, 3]


def test_no_more_than_the_engine_would_schedule_near_its_longest_text():
    room = {MAX_LEN - 5: 3, MAX_LEN - 4: 3, MAX_LEN - 3: 2, MAX_LEN - 2: 1, MAX_LEN - 1: 0}
    filled, filling = fill_up([[]] * 5, list(room), [True] * 5)
    assert filling == list(room.values()) == list(map(len, filled))
    assert fill_up([[71, 72]], [MAX_LEN - 2], [True]) == ([[71, 72]], [0]), "drafts stay as given"
