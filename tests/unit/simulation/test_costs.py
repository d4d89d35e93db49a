import json

import pandas as pd
import pytest

from sam_rollout.simulation.costs import CostRow, CostTable, CostTableError


def row(batch=1, query_len=1, context=0, graph=False, median_s=1.0):
    return CostRow(batch, query_len, context, graph, median_s)


def test_a_mean_counts_before_a_median():
    """Times of a rollout are sums of steps: its slow steps count, too."""
    common = {"query_len": 1, "context": 0, "graph": False}
    median = {**common, "batch": 1, "median_s": 2.0}
    both = {**common, "batch": 4, "median_s": 3.0, "mean_s": 5.0}
    costs = CostTable.from_json([median, both]).compile(0)
    assert costs.at(1, 0, 0) == 2.0
    assert costs.at(4, 0, 0) == 5.0
    with pytest.raises(CostTableError, match="mean_s"):
        CostTable.from_json([{**median, "mean_s": 0.0}])


CORNERS = [row(1, 1, 0, median_s=1.0), row(1, 1, 100, median_s=2.0), row(3, 1, 0, median_s=3.0),
           row(3, 1, 100, median_s=6.0)]  # fmt: skip
# A noisy last row, cheaper than the one before: far beyond it a step would cost nothing.
FALLING = [row(1), row(8, median_s=2.0), row(16, median_s=1.9), row(16, 4, median_s=1.8)]
# Two rows at one place have no slope.
TWICE = [row(1, 1, 100, median_s=1.0), row(1, 1, 100, median_s=3.0), row(2, 1, 200)]
LENGTHS = [row(query_len=1), row(query_len=5, median_s=3.0)]


@pytest.mark.parametrize(
    ("rows", "batch", "k", "context", "seconds"),
    [
        pytest.param(CORNERS, 2, 0, 50, (1.5 + 4.5) / 2, id="linear between rows"),
        pytest.param(CORNERS, 0.5, 0, 0, 1.0, id="below the table its first row counts"),
        pytest.param(CORNERS, 3, 0, 200, 9.0, id="above it goes on as in its last stretch"),
        pytest.param(FALLING, 12, 0, 0, 1.95, id="falls between rows"),
        pytest.param(FALLING, 512, 0, 0, 1.9, id="never falls beyond the last batch"),
        pytest.param(FALLING, 512, 9, 0, 1.8, id="never falls beyond the last length"),
        pytest.param(TWICE, 1, 0, 100, 2.0, id="measured twice counts as its mean"),
        pytest.param(TWICE, 1, 0, 200, 2.0, id="beyond the last context, too"),
        *(pytest.param(LENGTHS, 1, k, 0, 1 + k / 2, id=f"{k} drafts") for k in range(5)),
    ],
)
def test_times_on_and_beyond_the_grid(rows, batch, k, context, seconds):
    assert CostTable(rows).compile(9).at(batch, k, context) == pytest.approx(seconds)


def test_a_table_knows_how_far_its_verify_steps_go():
    table = CostTable([row(64), row(8, 2), row(4, 4), row(32, 100)])
    assert [table.verified_up_to(k) for k in (1, 2, 3, 4)] == [8, 4, 4, 0]
    with pytest.raises(CostTableError, match="no row with query_len 2 or more"):
        CostTable([row(64), row(32, 100)]).verified_up_to(1)


def test_prompts_are_no_steps():
    table = CostTable([row(), row(batch=2, query_len=100, median_s=4.0)])
    costs = table.compile(3)
    assert costs.at(1, 3, 0) == 1.0
    assert costs.prefill_s_per_token == pytest.approx(0.02)


def test_a_gate_that_leaves_its_graph_pays_for_it():
    """Graphs of query length 4 alone: a shut gate decodes eagerly, unless steps are filled up."""
    rows = [
        row(query_len=1, median_s=1.0),
        row(query_len=4, median_s=1.4),
        row(query_len=4, graph=True, median_s=0.5),
    ]
    left = CostTable(rows).compile(3, captured=[4])
    assert (left.at(1, 0, 0), left.at(1, 3, 0)) == (1.0, 0.5)
    padded = CostTable(rows).compile(3, captured=[4], pad=True)
    assert (padded.at(1, 0, 0), padded.at(1, 3, 0)) == (0.5, 0.5)


def test_what_is_no_table_is_said(tmp_path):
    path = tmp_path / "costs.json"
    for content, said in (
        ("{", "costs.json"),
        ("{}", "expected a list of rows"),
        (json.dumps([5]), "row 1 = 5"),
        (json.dumps([{"batch": 1}]), "row 1: no query_len; a row needs batch, query_len, context"),
        (json.dumps([{"batch": 0, "query_len": 1, "context": 0, "graph": False,
                      "median_s": 1}]), "batch = 0"),
        (json.dumps([{"batch": 1, "query_len": 1, "context": 0, "graph": False,
                      "median_s": "0.1"}]), "median_s = '0.1': must be a number above 0"),
        (json.dumps([{"batch": 1, "query_len": 1, "context": 0, "graph": False,
                      "median_s": 1, "mean_s": float("inf")}]), "mean_s = inf"),
        (json.dumps([]), "query_len 1"),
    ):  # fmt: skip
        path.write_text(content)
        with pytest.raises(CostTableError, match=said):
            CostTable.read(path)


def test_graph_mode_needs_a_graph_measured_for_every_length():
    with pytest.raises(CostTableError, match="graph = true"):
        CostTable([row()]).compile(3, captured=[4])
    verify = row(query_len=4, graph=True)
    with pytest.raises(CostTableError, match=r"a baseline's is 1.*not measured: 1$"):
        CostTable([row(), verify]).compile(1, captured={1, 4})


def test_a_table_survives_json():
    table = CostTable([row(), row(query_len=4, median_s=2.0)])
    assert CostTable.from_json({"rows": table.to_json()}).rows == table.rows


def test_recorded_steps_make_a_table():
    """Thirty decode steps of eight, twenty in which four verify three drafts each, one prompt."""
    decode = {"scheduled": 8, "prompt_tokens": 0, "draft_tokens": 0, "duration_s": 0.02}
    verify = {"scheduled": 4, "prompt_tokens": 0, "draft_tokens": 12, "duration_s": 0.03}
    rare = {"scheduled": 1, "prompt_tokens": 0, "draft_tokens": 0, "duration_s": 9.0}
    prompt = {"scheduled": 8, "prompt_tokens": 800, "draft_tokens": 0, "duration_s": 0.4}
    steps = pd.DataFrame([decode] * 30 + [verify] * 20 + [rare] + [prompt])
    costs = CostTable.of_steps(steps).compile(3)
    assert costs.at(8, 0, 0) == pytest.approx(0.02)
    assert costs.at(4, 3, 500) == pytest.approx(0.03)
    assert costs.prefill_s_per_token == pytest.approx(0.4 / 800)
