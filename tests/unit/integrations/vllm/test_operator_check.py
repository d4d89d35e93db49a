import json
import math
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

from sam_rollout.cli import app
from sam_rollout.integrations.vllm.operators import operator_check
from sam_rollout.integrations.vllm.operators.operator_check import (
    OperatorCheck,
    OperatorCheckError,
    differences,
    exceeds,
)

ENTRY = {"low": 0, "high": 128, "positions": 4, "maximum": 0.5, "mean": 0.1, "top_differs": 1}


def scored(logprobs, top=None, widths=None):
    count = len(logprobs)
    return {"logprobs": logprobs, "top": top or [0] * count, "widths": widths or [1] * count}


def test_differences_by_context_length_and_overall():
    reference = [scored([-9.0, -1.0, -2.0, -3.0], top=[1, 2, 3, 4])]
    verified = [scored([-5.0, -1.5, -2.0, -3.25], top=[9, 2, 3, 5], widths=[1, 3, 3, 3])]
    short, long, overall = differences([126], reference, verified, width=3)
    assert short == ENTRY | {"positions": 1, "mean": 0.5, "top_differs": 0}
    assert long == {
        "low": 128, "high": 256, "positions": 2, "maximum": 0.25, "mean": 0.125, "top_differs": 1
    }  # fmt: skip
    assert overall == ENTRY | {"high": 130, "positions": 3, "mean": 0.25}


def test_only_whole_verify_steps_count():
    reference = [scored([-1.0, -1.0, -1.0])]
    verified = [scored([-1.0, -1.0, -8.0], widths=[1, 4, 2])]
    assert differences([5], reference, verified, width=4)[-1]["positions"] == 1
    with pytest.raises(OperatorCheckError, match="no token was scored 9 at a time"):
        differences([5], reference, verified, width=9)


@pytest.mark.parametrize(("maximum", "above"), [(0.5, False), (0.51, True), (math.nan, True)])
def test_limit(maximum, above):
    assert exceeds({"maximum": maximum}, 0.5) is above


@pytest.mark.parametrize(
    "change", [{"dtype": "int8"}, {"draft_tokens": ()}, {"draft_tokens": (0,)}, {"max_tokens": 9}]
)
def test_settings_that_cannot_work_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        OperatorCheck("model", **change)


@pytest.fixture
def check_operators(tmp_path, monkeypatch):
    def found(check):
        broken = ENTRY | {"mean": math.nan}
        row = {"draft_tokens": 3, "overall": ENTRY, "by_length": [broken]}
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
    written = json.loads((tmp_path / "out.json").read_text())
    assert (written["setting"]["model"], written["setting"]["dtype"]) == ("some/model", "bfloat16")
    assert written["rows"][0]["by_length"][0]["mean"] is None, "a broken operator is still JSON"


@pytest.mark.parametrize(
    ("words", "named"), [(["--dtype", "int8"], "int8"), (["--max-tokens", "5"], "at least")]
)
def test_command_names_mistakes_in_one_line(check_operators, words, named):
    result = check_operators(*words)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert named in line
