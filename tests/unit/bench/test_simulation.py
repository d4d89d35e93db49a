import json

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.recorded_comparison import RESULTS
from sam_rollout.bench import simulated_engine as engine
from sam_rollout.bench.recorded_baseline import read_baseline
from sam_rollout.bench.simulated_engine import sample
from sam_rollout.cli import app
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.pages import ROOT
from tests.records import engine_step, engine_steps, requests, trace, traces

RUNS = ROOT / RESULTS / "runs"
SAID = [7, 3, 9, 4, 1, 8, 2, 6]  # what every response repeats


def write(folder, *, sam=False, replicas=1, texts=True, rounds=1, responses=4, tokens=60, limit=8):
    """Write a run of two training steps with a fixed time per step, request and prompt token."""
    run = RunFolder(folder)
    config = {
        "sam": {"enabled": sam},
        "actor_rollout_ref": {"rollout": {"max_num_seqs": limit}},
        "rollout_telemetry": {"tail_threshold": 2},
    }
    run.write_start(RunInfo("run", config, {}, {}, {}, "2026-01-01T00:00:00+00:00"))
    for replica in range(replicas):
        steps = [
            engine_step(
                step=step, replica=replica, running=running, duration_s=0.01 + 0.001 * running,
            )
            for step in (1, 2) for running in (1, 2, 4, 8) for _ in range(3)
        ]  # fmt: skip
        steps.append(engine_step(replica=replica, running=1, prompt_tokens=100, duration_s=0.1))
        run.write("engine_steps", replica, engine_steps(*steps))
        run.write("requests", replica, requests())
        if texts:
            rows = [
                trace(
                    step=step, replica=replica, group=f"{replica}/{turn}", sibling=number,
                    prompt_ids=[100, 101], response_ids=(SAID * tokens)[number : number + tokens],
                    start_s=100.0 * step + 10 * turn, end_s=100.0 * step + 10 * turn + 5,
                )
                for step in (1, 2) for turn in range(rounds) for number in range(responses)
            ]  # fmt: skip
            run.write("traces", replica, traces(*rows))
    return folder


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_recorded_run_is_foretold_within_fifteen_percent(number):
    run = read_baseline(RUNS / f"off-{number}")

    def recorded_s(name):
        steps = RunFolder(RUNS / name).read_train_steps()
        return sum(steps[step]["sam/engine/rollout_s"] for step in steps if step > 1)

    for side, drafts, within in (("off", False, 0.1), ("on", True, 0.15)):
        mean_s = np.mean([recorded_s(f"{side}-{i}") for i in (1, 2, 3)])
        foretold_s = sum(one.rollout_s for one in list(sample(run, drafts=drafts))[1:])
        assert foretold_s == pytest.approx(mean_s, rel=within)


def test_without_drafts_every_token_is_a_step_and_who_waits_joins_later(tmp_path):
    first_s = 4 * 2 * 0.001  # the first step computes four prompts of two tokens
    run = read_baseline(write(tmp_path / "all", responses=4, tokens=60))
    for outcome in sample(run, drafts=False):
        assert outcome.rollout_s == pytest.approx(first_s + 59 * 0.014, rel=0.01)
        assert outcome.accepted == outcome.tail_s == 0
    rounds = read_baseline(write(tmp_path / "rounds", rounds=3))
    assert [len(one) for one in rounds.rollouts[0].rounds] == [4, 4, 4]
    assert next(sample(rounds, drafts=False)).rollout_s == pytest.approx(3 * outcome.rollout_s)
    limited = read_baseline(write(tmp_path / "limited", responses=4, tokens=60, limit=2))
    (one, _) = sample(limited, drafts=False)
    assert one.rollout_s == pytest.approx(2 * (4 * 0.001 + 59 * 0.012), rel=0.01)
    assert one.tail_s == pytest.approx(one.rollout_s / 2, rel=0.01), "later no request waits"


def test_texts_that_repeat_themselves_gain_and_the_next_step_remembers(tmp_path):
    run = read_baseline(write(tmp_path, tokens=200))
    base, sam = (list(sample(run, drafts=drafts)) for drafts in (False, True))
    assert base[0].rollout_s > 1.2 * sam[0].rollout_s


def test_engines_draft_from_what_others_sample(tmp_path, monkeypatch):
    said = np.random.default_rng(0).integers(0, 30_000, 300).tolist()
    folder = write(tmp_path, replicas=2, texts=False)
    for replica in (0, 1):
        rows = [
            trace(step=1, replica=replica, group="g", sibling=replica, prompt_ids=[1, 2],
                  response_ids=[*range(replica * 40), *said])
        ]  # fmt: skip
        RunFolder(folder).write("traces", replica, traces(*rows))
    run = read_baseline(folder)
    assert run.engines == 2
    (outcome,) = sample(run, drafts=True)
    assert outcome.accepted > 20
    monkeypatch.setattr(engine, "_exchange", lambda engines: None)
    (alone,) = sample(run, drafts=True)
    assert alone.accepted < 5


def test_step_times_go_on_beyond_what_was_recorded(tmp_path):
    times = read_baseline(write(tmp_path)).times
    assert times(3) == pytest.approx(0.013)
    assert times(16) == pytest.approx(0.026), "with the slope of the recorded times"
    assert times(1, drafts=3) == pytest.approx(0.014), "as a step of four requests"
    assert times(1, drafts=3, prompts=10) == pytest.approx(0.024)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sam": True}, "drafts were made in this run; name one with sam=off"),
        ({"texts": False}, "record_traces=true"),
    ],
)
def test_what_is_missing_is_one_line(tmp_path, options, said):
    done = CliRunner().invoke(app, ["simulate", str(write(tmp_path, **options))])
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert said in done.output.replace("\n", "")


def test_the_command_tells_and_writes_figures(tmp_path):
    output = tmp_path / "found.json"
    folder = write(tmp_path / "run")
    done = CliRunner().invoke(app, ["simulate", str(folder), "--steps", "1", "--json", str(output)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(output.read_text())["steps"]
    assert row["step"] == 1
    assert row["sam"]["rollout_s"] < row["base"]["rollout_s"]
    assert "times as" in done.output
