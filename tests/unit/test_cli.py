import json
import re
import sys

import pytest
from typer.testing import CliRunner

from sam_rollout.cli import app
from sam_rollout.telemetry.records import RunFolder, RunInfo


def run_cli(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def make_run(path, sam: bool, time_s: float):
    folder = RunFolder(path)
    label, config = f"sam={'on' if sam else 'off'}", {"sam": {"enabled": sam}}
    folder.write_start(RunInfo(label, config, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    for step in range(1, 7):
        accuracy = 0.1 * step + 0.01 * (step % 2)
        metrics = {"timing_s/gen": time_s, "sam/rounds/accuracy_unfiltered": accuracy}
        folder.append_train_step(step, metrics)
    return path


@pytest.fixture
def pair(tmp_path):
    return make_run(tmp_path / "off", False, 4159.06), make_run(tmp_path / "on", True, 3793.29)


def test_compare_prints_and_writes(pair, tmp_path):
    base, sam = pair
    picture, figures = tmp_path / "out.png", tmp_path / "out.json"
    result = run_cli(
        "compare", base, "--with", sam, "--picture", picture, "--json", figures, "--skip-first", 2
    )
    assert result.exit_code == 0, result.output
    assert "+9.6%" in result.output and "+8.8%" in result.output
    assert "skipped at the start: 1, 2" in result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads(figures.read_text())["steps"] == [3, 4, 5, 6]


@pytest.mark.parametrize("spelt", ["--with A B", "--with A --with B"])
def test_compare_takes_several_runs_a_side(pair, tmp_path, spelt):
    base, sam = pair
    other = make_run(tmp_path / "on-2", True, 3800.0)
    paths = {"A": str(sam), "B": str(other)}
    spelt = [re.sub(r"\b[AB]\b", lambda found: paths[found[0]], word) for word in spelt.split()]
    page, figures = tmp_path / "out.html", tmp_path / "out.json"
    result = run_cli("compare", base, base, *spelt, "--html", page, "--json", figures)
    assert result.exit_code == 0, result.output
    content = json.loads(figures.read_text())
    assert [run["path"] for run in content["sam"]] == [str(sam), str(other)]
    assert len(content["base"]) == 2
    assert page.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize("arguments", [["A"], ["A", "--with"], ["--with", "A"]])
def test_compare_without_both_sides_is_wrong_usage(pair, arguments):
    result = run_cli("compare", *(pair[0] if word == "A" else word for word in arguments))
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_benchmark_that_could_not_be_written_down_is_not_run(tmp_path, monkeypatch):
    from sam_rollout.bench import drafter_bench as drafts

    monkeypatch.setattr(drafts, "measure", lambda *_: pytest.fail("measured"))
    line = one_line_error(run_cli("bench", "drafter", "--json", tmp_path / "no" / "a"))
    assert line.endswith(f"{tmp_path / 'no'} is no folder")


def one_line_error(result) -> str:
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


def test_folders_without_a_run_are_named(pair, tmp_path):
    def error() -> str:
        return one_line_error(run_cli("compare", pair[0], "--with", pair[1]))

    line = one_line_error(run_cli("compare", pair[0], "--with", tmp_path / "nowhere"))
    missing = tmp_path / "nowhere" / "sam" / "run.json"
    assert line.startswith(f"sam-rollout: no file {missing}: expected a run folder")
    steps = pair[0] / "sam" / "train_steps.jsonl"
    steps.write_text("")
    assert error() == f"sam-rollout: {steps}: expected at least one training step"
    steps.unlink()
    assert str(steps) in error()
    (pair[0] / "sam" / "run.json").unlink()
    (pair[0] / "sam").rmdir()
    assert f"no file {pair[0] / 'sam' / 'run.json'}: expected " in error()


@pytest.mark.parametrize("error", [RuntimeError("no device"), OSError("no such model")])
def test_a_check_that_cannot_be_made_is_status_2(monkeypatch, error):
    from sam_rollout.integrations.vllm.operators import operator_check

    def fails(_):
        raise error

    monkeypatch.setattr(operator_check, "run", fails)
    result = run_cli("check-operators", "--model", "some/model")
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.splitlines()[-1] == f"sam-rollout: {error}"
    assert ("Traceback" in result.stderr) == isinstance(error, RuntimeError)


def test_the_dashboard_is_written_without_a_network_or_says_what_it_lacks(tmp_path, monkeypatch):
    specification = tmp_path / "workspace.json"
    result = run_cli("dashboard", "--project", "p", "--json", specification)
    assert result.exit_code == 0, result.output
    assert json.loads(specification.read_text())["project"] == "p"
    assert "--entity" in run_cli("dashboard").output
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.setitem(sys.modules, "wandb_workspaces.workspaces", None)
    extra = "pip install 'sam_rollout[dashboard]'"
    lacking = {("--json", specification): extra, ("--picture", "out"): "name run folders"}
    for arguments, said in lacking.items():
        result = run_cli("dashboard", *arguments)
        assert result.exit_code == 2 and said in result.output
