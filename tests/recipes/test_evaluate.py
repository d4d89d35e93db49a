import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch

from recipes.dapo_qwen3 import evaluate, ties
from recipes.dapo_qwen3.evaluate import Response, compare, parser, summarise, verdict
from recipes.dapo_qwen3.problems import COLUMNS, lay_out, rows_of
from recipes.dapo_qwen3.ties import Divergence, divergences, look_at_ties
from sam_rollout.core.statistics import mean, share
from sam_rollout.core.traces import read_traces
from sam_rollout.verification import draw_gumbel, draw_tokens, keyed_bits
from sam_rollout.verification import ties as tie_distances
from sam_rollout.verification.ties import distance_of_draw, noise_of, uniform_of


def response(accuracy, token_ids=(1, 2), clipped=False):
    return Response([0], "text", list(token_ids), clipped, float(accuracy), "")


def groups(*accuracies):
    return [[response(accuracy) for accuracy in group] for group in accuracies]


@pytest.mark.parametrize(
    ("side", "estimate"),
    [
        ([[1], [0], [1], [1]], share(3, 4)),
        ([[1, 0], [1, 1], [0, 0]], mean([0.5, 1.0, 0.0])),
        ([[1, 1, 1, 0], [0]], mean([0.75, 0.0])),
    ],
)
def test_one_sample_a_problem_gives_wilson_and_several_the_bootstrap(side, estimate):
    found = summarise(groups(*side))
    assert found["pass_at_1"] == asdict(estimate) and found["problems"] == len(side)


def test_copies_of_a_prompt_are_further_samples_of_it():
    a, b = [1, 2], [3]
    requests = lay_out([a, b, a, a], samples=2, seed=0)
    assert [(one.row, one.problem, one.sample) for one in requests] == [
        (0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1), (2, 0, 2), (2, 0, 3), (3, 0, 4), (3, 0, 5),
    ]  # fmt: skip
    assert [one.identity.sibling for one in requests] == [one.sample for one in requests]
    assert len({one.identity.key for one in requests}) == len(requests)
    assert lay_out([a], 2, 0) == requests[:2]


def test_divergences_name_request_place_and_tokens():
    off = [[response(1, [1, 2, 3]), response(1, [4, 5])], [response(0, [6])]]
    on = [[response(1, [1, 2, 3]), response(1, [4, 7])], [response(0, [6, 8])]]
    assert divergences(off, on) == [Divergence(0, 1, 1, 5, 7), Divergence(1, 0, 1, None, 8)]
    assert divergences(groups([1]), groups([0])) == []


@pytest.mark.parametrize(
    ("ties", "looked_at", "kept", "words"),
    [
        ([], 0, True, "same trajectories, up to 0 numerical ties"),
        ([True], 1, True, "same trajectories"),
        ([False], 1, False, "NOT KEPT"),
        ([None], 0, False, "NOT KEPT"),
        ([True, None, True], 2, True,
         "same trajectories, up to 2 numerical ties (2 of 3 looked at)"),
        ([True, None, False], 2, False, "NOT KEPT: 1 differences are no numerical ties (2 of 3 "),
    ],
)  # fmt: skip
def test_only_ties_excuse_a_difference(ties, looked_at, kept, words):
    parted = [Divergence(0, n, 1, 2, 3, tie) for n, tie in enumerate(ties)]
    side = groups([1] * len(ties) or [1], [0])
    comparison = compare(side, side, parted, must_be_identical=True, drafted=True)
    assert (comparison["kept"], comparison["looked_at"]) == (kept, looked_at)
    assert comparison["identical"] == (1 if ties else 2)
    assert comparison["equal_within_interval"] and comparison["difference"]["value"] == 0.0
    assert verdict(comparison)[-1].startswith(words)


@pytest.mark.parametrize(("promised", "kept"), [(True, False), (False, None)])
def test_equality_without_drafts_proves_nothing(promised, kept):
    side = groups([1], [0])
    comparison = compare(side, side, [], must_be_identical=promised, drafted=False)
    assert comparison["identical"] == 2 and comparison["kept"] is kept
    assert verdict(comparison)[-1].startswith("NO DRAFTS: the side meant to draft did not draft")


def test_a_real_loss_is_outside_the_interval():
    off = groups(*[[1, 1]] * 40)
    on = groups(*[[1, 0]] * 30, *[[1, 1]] * 10)
    comparison = compare(off, on, [], must_be_identical=False, drafted=True)
    assert comparison["difference"]["value"] == pytest.approx(-0.375)
    assert not comparison["equal_within_interval"] and comparison["kept"] is None
    assert "NOT EQUAL" in verdict(comparison)[0]


def test_distance_of_draw():
    probabilities = np.array([0.2, 0.3, 0.0, 0.5])
    # The number 0.49 draws token 1. Token 3's interval begins at 0.5; token 0's ends at 0.2.
    assert distance_of_draw(probabilities, 0.49, (1,)) == 0.0
    assert distance_of_draw(probabilities, 0.49, (1, 3)) == pytest.approx(0.01)
    assert distance_of_draw(probabilities, 0.49, (0, 3)) == pytest.approx(0.29)
    assert distance_of_draw(probabilities, 0.49, (1, None)) == math.inf


def partings(count):
    requests = lay_out([[9], [8]], samples=(count + 1) // 2, seed=0)[:count]
    off = [[response(1, [1] * (count + 1))] * ((count + 1) // 2) for _ in range(2)]
    places = [
        Divergence(one.problem, one.sample, count - number, 0, 2)
        for number, one in enumerate(requests)
    ]
    return places, requests, off


def test_the_first_places_are_looked_at(monkeypatch):
    monkeypatch.setattr(ties, "MOST_LOOKED_AT", 5)
    parted, requests, off = partings(6)
    asked = []

    def logprobs_after(request, text):
        asked.append((request, text))
        return np.array([-1.0, -3.0, -1.01])

    options = parser().parse_args(["--greedy", "--samples", "3"])
    look_at_ties(parted, requests, off, logprobs_after, options)
    # parted[0] has the latest position, so it is not among the five that are examined.
    assert [one.tie for one in parted] == [None] + [True] * 5
    assert parted[0].distance is None
    assert parted[1].distance == pytest.approx(0.01)
    assert len(asked) == 5 and asked[0] == (requests[-1], requests[-1].prompt_ids + [1])


@pytest.mark.parametrize(("noise", "distance"), [([0.0, 1.0, 2.0], 0.01), ([0.0, 5.0, 0.0], 4.99)])
def test_with_gumbel_noise_a_tie_is_one_once_it_is_added(monkeypatch, noise, distance):
    options = parser().parse_args(["--rollout-sampler", "coupled", "--samples", "2"])
    parted, requests, off = partings(4)
    monkeypatch.setattr(tie_distances, "noise_of", lambda *_: np.array(noise))
    look_at_ties(parted, requests, off, lambda *_: np.array([-1.0, -3.0, -2.99]), options)
    assert [one.distance for one in parted] == pytest.approx([distance] * 4)
    assert all(one.tie == (distance < 0.05) for one in parted)


def test_random_numbers_are_those_of_the_samplers():
    probabilities = np.random.default_rng(0).dirichlet(np.ones(50), 100).astype(np.float32)
    for position, row in enumerate(probabilities):
        bits = keyed_bits(torch.tensor([4711]), torch.tensor([position]))
        token = int(draw_tokens(torch.tensor(row)[None], bits)[0])
        assert distance_of_draw(row, uniform_of(4711, position), (token,)) < 1e-6
        logits = np.log(row)
        scores = logits + noise_of(4711, position, 50)
        assert scores.max() - scores[int(draw_gumbel(torch.tensor(logits)[None], bits)[0])] < 1e-5


def test_problems_are_read_and_limited(tmp_path):
    path = tmp_path / "test.parquet"
    table = pd.DataFrame({name: ["a", "b"] for name in COLUMNS})
    table.to_parquet(path)
    assert len(rows_of(path, None)) == 2
    assert len(rows_of(path, limit=1)) == 1
    table[["prompt"]].to_parquet(path)
    with pytest.raises(ValueError, match="reward_model"):
        rows_of(path, None)


@pytest.mark.parametrize("arguments", [["--samples", "0"], ["--temperature", "0"]])
def test_mistakes_show_before_an_engine_starts(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        evaluate.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"argument {arguments[0]}: 0" in said and "must be above 0" in said


def test_missing_data_show_before_an_engine_starts(capsys):
    assert evaluate.main(["--data", "nowhere.parquet"]) == 2
    assert capsys.readouterr().err == "error: nowhere.parquet: there is no such file\n"


@pytest.mark.parametrize("error", [RuntimeError("no device"), OSError("no such model")])
def test_an_evaluation_that_cannot_be_made_is_status_2(monkeypatch, capsys, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(evaluate, "rows_of", lambda _data, _limit: [])
    monkeypatch.setattr(evaluate, "evaluate", fails)
    assert evaluate.main([]) == 2
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(("drafted", "status"), [(0, 1), (9, 0)])
def test_status_follows_the_promise_and_responses_are_traces(
    monkeypatch, capsys, tmp_path, drafted, status
):
    def found(_rows, options):
        sides = {name: summarise(groups([1], [0])) for name in evaluate.SIDES}
        comparison = compare(groups([1], [0]), groups([1], [0]), [], True, drafted > 0)
        result = {"setting": evaluate._setting(options, 2, 2), "sides": sides}
        return result | {"comparison": comparison, "responses": {"off": groups([1], [0])}}

    monkeypatch.setattr(evaluate, "rows_of", lambda _data, _limit: [])
    monkeypatch.setattr(evaluate, "evaluate", found)
    path = tmp_path / "texts.jsonl"
    assert evaluate.main(["--responses", str(path)]) == status
    assert [trace.tokens.tolist() for trace in read_traces(path)] == [[0, 1, 2]] * 2
    assert ("NO DRAFTS" in capsys.readouterr().out) == (drafted == 0)
