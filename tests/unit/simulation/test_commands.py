import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from sam_rollout.bench.generator import group
from sam_rollout.cli import app
from sam_rollout.simulation import validation
from sam_rollout.simulation.costs import CostRow, CostTable
from sam_rollout.simulation.validation import Row, Validation


@pytest.fixture
def costs(tmp_path):
    rows = [CostRow(b, q, 0, False, 0.01 + 0.0005 * b) for b in (1, 16) for q in (1, 4, 9)]
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(CostTable(rows).to_json()))
    return path


@pytest.fixture
def texts(tmp_path):
    path = tmp_path / "texts.jsonl"
    lines = [
        {"group": t.group, "sibling": t.sibling, "step": 1, "prompt": t.prompt.tolist(),
         "response": t.response.tolist()}
        for index in range(2) for t in group(index, 3, 600)
    ]  # fmt: skip
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_simulate_replays_a_file_of_texts(texts, costs, tmp_path):
    output, picture = tmp_path / "out.json", tmp_path / "out.png"
    done = run("simulate", texts, "--calibration", costs, "--threshold", 2, "--threshold", 8,
               "--siblings", "--json", output, "--picture", picture, "--replicas", 2)  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(output.read_text())["settings"]
    assert next(iter(found)) == "baseline" and len(found) == 6
    best = min(figures["rollout_s"] for name, figures in found.items() if "siblings" not in name)
    assert found["auto, k up to 3"]["rollout_s"] < 1.03 * best
    assert found["k=3, threshold 8"]["rollout_s"] < found["baseline"]["rollout_s"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_drafts_without_verify_steps_are_refused_and_guesses_said(texts, tmp_path):
    path = tmp_path / "costs.json"
    rows = [CostRow(batch, 1, 0, False, 0.01) for batch in (1, 16)]
    path.write_text(json.dumps(CostTable(rows).to_json()))
    done = run("simulate", texts, "--calibration", path)
    assert done.exit_code == 2
    assert "no row with query_len 2 or more" in done.output
    path.write_text(json.dumps(CostTable([*rows, CostRow(2, 4, 0, False, 0.01)]).to_json()))
    with pytest.warns(UserWarning, match="k=3, up to 6 requests: .* for up to 2 requests"):
        done = run("simulate", texts, "--calibration", path, "--threshold", 8)
    assert done.exit_code == 0, done.output
    with pytest.warns(UserWarning, match="for no number of requests"):
        run("simulate", texts, "--calibration", path, "--threshold", 1, "--k", 5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "nowhere", "--calibration", "no.json"], "no.json"),
        (["simulate"], "a run folder or a file of traces"),
        (["simulate", "somewhere"], "needed to replay a run"),
        (["simulate", "--check", "--picture", "a.png"], "--picture: not with --check"),
        (["simulate", "--check", "--threshold", "8"], "--threshold: not with --check"),
        (["simulate", "--check", "somewhere"], "--check takes none"),
    ],
)
def test_errors_are_one_line(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.output and "Traceback" not in done.output


def test_a_rollout_off_by_more_than_a_tenth_fails_the_check(monkeypatch, tmp_path):
    for ratio, status in ((1.09, 0), (0.89, 1)):
        row = Row(3, 8, 64, 1, 10.0, 10.0 * ratio, 10.0, 3.0, 3.0)
        monkeypatch.setattr(Validation, "__init__", lambda self, record, traces: None)
        monkeypatch.setattr(Validation, "rows", lambda self, progress, row=row: [row])
        done = run("simulate", "--check", "--json", tmp_path / "check.json")
        assert done.exit_code == status, done.output
        assert ("MISSED" in done.output) == bool(status)
        (found,) = json.loads((tmp_path / "check.json").read_text())["rollouts"]
        assert found["predicted_s"] == 10.0 * ratio


def test_a_check_without_a_record_fails_and_names_its_program(monkeypatch, tmp_path):
    monkeypatch.setattr(validation, "RECORD", tmp_path / "no.json")
    done = run("simulate", "--check")
    assert done.exit_code == 1 and "Traceback" not in done.output, done.output
    assert "benchmarks/simulate_validation.py" in done.output


def test_imports_no_engine():
    code = (
        "import sys, sam_rollout.simulation.front; "
        "print(sorted({'torch', 'vllm', 'verl', 'vllm_ascend', 'ray'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
