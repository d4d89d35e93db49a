"""The evaluation's statistics and its comparison of two sides, without an engine."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from recipes.dapo_qwen3 import evaluate
from recipes.dapo_qwen3.evaluate import (
    Divergence,
    Response,
    compare,
    distance_of_draw,
    divergences,
    first_difference,
    over_problems,
    parser,
    read_problems,
    summarise,
    uniform_of,
    verdict,
    wilson,
)


def response(accuracy, token_ids=(1, 2), clipped=False):
    return Response("text", list(token_ids), clipped, float(accuracy), "")


def groups(*accuracies):
    return [[response(accuracy) for accuracy in group] for group in accuracies]


@pytest.mark.parametrize(("right", "total"), [(0, 10), (3, 10), (10, 10), (180, 256)])
def test_wilson_is_scipys(right, total):
    ours = wilson(right, total)
    theirs = binomtest(right, total).proportion_ci(0.95, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-9)
    assert ours.value == right / total


def test_bootstrap_covers_the_standard_error_and_is_repeatable():
    values = np.random.default_rng(1).random(400)
    interval = over_problems(values)
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert interval.low < interval.value < interval.high
    assert over_problems(values) == interval


@pytest.mark.parametrize("values", [[0.5], [0.25, 0.25, 0.25]])
def test_values_that_do_not_vary_have_a_point_for_an_interval(values):
    interval = over_problems(values)
    assert interval.low == interval.value == interval.high == values[0]


def test_one_sample_a_problem_gives_wilson_and_several_the_bootstrap():
    single = summarise(groups([1], [0], [1], [1]), 2.0)
    assert single.pass_at_1 == wilson(3, 4)
    several = summarise(groups([1, 0], [1, 1], [0, 0]), 2.0)
    assert several.pass_at_1 == over_problems([0.5, 1.0, 0.0])
    assert (several.problems, several.samples_per_problem) == (3, 2)


def test_lengths_and_clipped_share():
    side = summarise([[response(1, [1, 2, 3], True)], [response(0, [1])]], 1.5)
    assert (side.mean_response_length, side.clipped_share, side.generation_s) == (2.0, 0.5, 1.5)


@pytest.mark.parametrize(
    ("off", "on", "position"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1, 2], [1], 1), ([], [1], 0)],
)
def test_first_difference(off, on, position):
    assert first_difference(off, on) == position


def test_divergences_name_request_place_and_tokens():
    off = [[response(1, [1, 2, 3]), response(1, [4, 5])], [response(0, [6])]]
    on = [[response(1, [1, 2, 3]), response(1, [4, 7])], [response(0, [6, 8])]]
    assert divergences(off, on) == [Divergence(0, 1, 1, 5, 7), Divergence(1, 0, 1, None, 8)]


def test_identical_sides_keep_the_promise():
    side = groups([1], [0])
    comparison = compare(side, side, [], must_be_identical=True)
    assert comparison.kept and comparison.identical_share == 1.0
    assert comparison.equal_within_interval and comparison.difference.value == 0.0


@pytest.mark.parametrize(("tie", "kept"), [(True, True), (False, False), (None, False)])
def test_only_ties_excuse_a_difference(tie, kept):
    parted = [Divergence(0, 0, 1, 2, 3, tie)]
    comparison = compare(groups([1], [0]), groups([1], [0]), parted, must_be_identical=True)
    assert (comparison.kept, comparison.identical, comparison.identical_share) == (kept, 1, 0.5)
    lines = verdict(evaluate.asdict(comparison))
    assert lines[-1].startswith("same trajectories" if kept else "NOT KEPT")


def test_a_real_loss_is_outside_the_interval():
    off = groups(*[[1, 1]] * 40)
    on = groups(*[[1, 0]] * 30, *[[1, 1]] * 10)
    comparison = compare(off, on, [], must_be_identical=False)
    assert comparison.difference.value == pytest.approx(-0.375)
    assert not comparison.equal_within_interval and comparison.kept is None
    assert "NOT EQUAL" in verdict(evaluate.asdict(comparison))[0]


def test_distance_of_draw():
    probabilities = np.array([0.2, 0.3, 0.0, 0.5])
    # 0.49 draws token 1; token 3 begins at 0.5; token 0 ends at 0.2.
    assert distance_of_draw(probabilities, 0.49, (1,)) == 0.0
    assert distance_of_draw(probabilities, 0.49, (1, 3)) == pytest.approx(0.01)
    assert distance_of_draw(probabilities, 0.49, (0, 3)) == pytest.approx(0.29)
    assert distance_of_draw(probabilities, 0.49, (1, None)) == math.inf


def test_uniforms_are_those_of_the_sampler():
    import torch

    from sam_rollout.verification import draw_tokens, keyed_bits

    probabilities = np.random.default_rng(0).dirichlet(np.ones(50), 100).astype(np.float32)
    for position, row in enumerate(probabilities):
        bits = keyed_bits(torch.tensor([4711]), torch.tensor([position]))
        token = int(draw_tokens(torch.tensor(row)[None], bits)[0])
        assert distance_of_draw(row, uniform_of(4711, position), (token,)) < 1e-6


def test_problems_are_read_and_limited(tmp_path):
    path = tmp_path / "test.parquet"
    table = pd.DataFrame({name: ["a", "b"] for name in evaluate.COLUMNS})
    table.to_parquet(path)
    assert len(read_problems(path)) == 2
    assert len(read_problems(path, limit=1)) == 1
    table[["prompt"]].to_parquet(path)
    with pytest.raises(ValueError, match="reward_model"):
        read_problems(path)


@pytest.mark.parametrize(
    "arguments",
    [["--samples", "0"], ["--temperature", "0"], ["--data", "nowhere.parquet"],
     ["--sides", "on", "on"]],
)  # fmt: skip
def test_mistakes_show_before_an_engine_starts(arguments, capsys):
    assert evaluate.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_record_names_no_path_of_the_machine(tmp_path):
    options = parser().parse_args(["--data", str(tmp_path / "test.parquet")])
    text = json.dumps(evaluate._setting(options, 3))
    assert str(tmp_path) not in text and str(evaluate.TINY_MODEL) not in text
    assert json.loads(text)["model"] == "tiny_qwen3"


def test_drafts_are_summed_over_workers_that_have_a_drafter():
    drained = [{"requests": {"a": (3, 9, 4), "b": (1, 3, 0)}}, None]
    assert evaluate.count_drafts(drained) == (12, 4)
    assert evaluate.count_drafts([None]) == (0, 0)
