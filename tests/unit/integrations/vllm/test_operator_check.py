"""The arithmetic of the operator check, and the leading along known texts, without an engine."""

import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from sam_rollout.cli import app
from sam_rollout.integrations.vllm.operators import operator_check
from sam_rollout.integrations.vllm.operators.known_text import TextScores, known_text_arguments
from sam_rollout.integrations.vllm.operators.operator_check import (
    OperatorCheck,
    OperatorCheckError,
    ScoredText,
    buckets,
    differences,
    exceeds,
    to_json,
)

ENTRY = {"low": 0, "high": 128, "positions": 4, "maximum": 0.5, "mean": 0.1, "top_differs": 1}


def scored(context, logprobs, top=None, widths=None):
    count = len(logprobs)
    return ScoredText(context, logprobs, top or [0] * count, widths or [1] * count)


def test_buckets_double_and_leave_out_empty_ones():
    assert buckets(np.array([3, 127])) == [(0, 128)]
    assert buckets(np.array([128, 255, 600])) == [(128, 256), (512, 1024)]


def test_differences_by_context_length_and_overall():
    reference = [scored(126, [-9.0, -1.0, -2.0, -3.0], top=[1, 2, 3, 4])]
    verified = [scored(126, [-5.0, -1.5, -2.0, -3.25], top=[9, 2, 3, 5], widths=[1, 3, 3, 3])]
    short, long, overall = differences(reference, verified, width=3)
    assert (short.low, short.high, short.positions, short.maximum) == (0, 128, 1, 0.5)
    assert (long.low, long.positions, long.maximum, long.mean) == (128, 2, 0.25, 0.125)
    # The first token comes from the prefill on both sides and does not count.
    assert (overall.positions, overall.maximum, overall.mean) == (3, 0.5, 0.25)
    assert (short.top_differs, long.top_differs, overall.top_differs) == (0, 1, 1)


def test_only_whole_verify_steps_count():
    reference = [scored(5, [-1.0, -1.0, -1.0])]
    verified = [scored(5, [-1.0, -1.0, -8.0], widths=[1, 4, 2])]
    assert differences(reference, verified, width=4)[-1].positions == 1
    with pytest.raises(OperatorCheckError, match="no token was scored 9 at a time"):
        differences(reference, verified, width=9)


def test_scorings_of_other_texts_are_refused():
    with pytest.raises(OperatorCheckError, match="same texts"):
        differences([scored(5, [-1.0, -1.0])], [scored(5, [-1.0])], width=1)


@pytest.mark.parametrize(("maximum", "above"), [(0.5, False), (0.51, True), (math.nan, True)])
def test_limit(maximum, above):
    assert exceeds({"maximum": maximum}, 0.5) is above


def test_a_broken_operator_is_still_json():
    assert json.loads(to_json({"rows": [{"mean": math.nan}], "maximum": 1.0})) == {
        "rows": [{"mean": None}],
        "maximum": 1.0,
    }


@pytest.mark.parametrize(
    "change", [{"dtype": "int8"}, {"draft_tokens": ()}, {"draft_tokens": (0,)}, {"max_tokens": 9}]
)
def test_settings_that_cannot_work_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        OperatorCheck("model", **change)


def request(number, known, done, drafts):
    extra = known_text_arguments(number, known, drafts)
    return SimpleNamespace(
        sampling_params=SimpleNamespace(extra_args=extra), output_token_ids=known[:done]
    )


def test_leading_notes_scores_and_allows_the_known_token_only():
    torch.manual_seed(0)
    logits = torch.randn(4, 10)
    before = logits.log_softmax(-1)
    scores = TextScores()
    # The second request has one token left, though two positions are scored for it.
    requests = [request(0, [7, 3, 5], 1, 1), request(1, [2, 4], 1, 1)]
    scores.lead(logits, requests, [2, 2])
    assert logits[:3].argmax(-1).tolist() == [3, 5, 4]
    assert torch.isinf(logits[:3]).sum() == 3 * 9
    assert torch.isfinite(logits[3]).all()  # beyond the text: the model's business
    drained = scores.drain()
    expected = [before[0, 3], before[1, 5]]
    assert drained[0]["logprobs"][1:] == pytest.approx([float(value) for value in expected])
    assert drained[0]["top"][1:] == before[:2].argmax(-1).tolist()
    assert drained[0]["widths"] == [0, 2, 2]
    assert drained[1]["widths"] == [0, 2]
    assert scores.drain() == {}


def test_rows_that_do_not_fit_are_an_error():
    with pytest.raises(RuntimeError, match="2 scored positions expected, 3 rows"):
        TextScores().lead(torch.zeros(3, 10), [request(0, [1, 2], 0, 1)], [2])


@pytest.fixture
def check_operators(tmp_path, monkeypatch):
    """The command with an engine that found a maximum difference of 0.5."""

    def found(check):
        row = {"draft_tokens": 3, "overall": ENTRY, "by_length": [ENTRY]}
        return {"setting": asdict(check), "device": "cpu", "rows": [row], "maximum": 0.5}

    monkeypatch.setattr(operator_check, "run", found)
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["check-operators", *words])


@pytest.mark.parametrize(("limit", "status"), [("0.6", 0), ("0.4", 1)])
def test_command_judges_and_writes(check_operators, limit, status, tmp_path):
    result = check_operators(
        "--model", "some/model", "--dtype", "bf16", "--limit", limit, "--json", "out.json"
    )
    assert result.exit_code == status, result.output
    setting = json.loads((tmp_path / "out.json").read_text())["setting"]
    assert (setting["model"], setting["dtype"]) == ("some/model", "bfloat16")


@pytest.mark.parametrize(
    ("words", "named"),
    [(["--dtype", "int8"], "int8"), ([], "no folder recipes"), (["--max-tokens", "5"], "at least")],
)
def test_command_names_mistakes_in_one_line(check_operators, words, named):
    result = check_operators(*words)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert named in line
