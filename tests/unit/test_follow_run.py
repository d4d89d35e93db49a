import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from sam_rollout.telemetry.records import RunFolder, RunInfo

SCRIPT = Path(__file__).parents[2] / "scripts" / "lib" / "follow_run.py"
LOG = {
    "starting Ray": "ray init kwargs: {}",
    "loading the trainer": "(TaskRunner) train and validate dataloader initialized",
    "starting the vLLM engine": "(TaskRunner) reward loop manager initialized",
    "engine is up": "(SamHttpServer) sam_rollout: drafter X on 1 worker(s), k=3",
    "training": "(TaskRunner) ready to fit",
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("follow_run", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path):
    (tmp_path / "log.txt").touch()
    return RunFolder(tmp_path)


@pytest.fixture
def follower(script, run):
    return script.Follower(run.path)


def log(run: RunFolder, *lines: str) -> None:
    with open(run.path / "log.txt", "a") as file:
        file.writelines(f"{line}\n" for line in lines)


def train(run: RunFolder, step: int, **metrics: float) -> None:
    if step == 1:
        config = {"trainer": {"total_training_steps": 2}}
        run.write_start(RunInfo("sam=on", config, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    run.append_train_step(step, {"timing_s/step": 2.5, **metrics})


def messages(capsys) -> list[str]:
    return [line.split(" s  ", 1)[-1] for line in capsys.readouterr().out.splitlines()]


def test_each_milestone_is_told_once_and_in_order(run, follower, capsys):
    told = []
    for line in LOG.values():
        log(run, line, "something else")
        follower.poll()
        follower.poll()
        told += messages(capsys)
    assert [message.partition(":")[0] for message in told] == list(LOG)
    assert "engine is up: sam_rollout: drafter X on 1 worker(s), k=3" in told


def test_each_step_is_told_once_and_nothing_of_the_log_of_a_finished_run(run, follower, capsys):
    log(run, "a line of the log")
    train(run, 1, **{"critic/score/mean": -0.25, "sam/draft/acceptance_length": 1.5})
    follower.poll()
    follower.poll()
    assert messages(capsys) == ["step 1/2  reward -0.25  acceptance 1.50  step 2.5 s"]
    train(run, 2)
    follower.finish()
    assert messages(capsys) == ["step 2/2  step 2.5 s"]


def test_a_step_that_is_being_written_is_told_later(run, follower, capsys):
    run.root.mkdir()
    run.train_steps_path.touch()
    follower.poll()
    train(run, 1)
    follower.poll()
    assert messages(capsys) == ["step 1/2  step 2.5 s"]


@pytest.mark.parametrize("steps", [0, 1])
def test_a_run_that_stops_early_shows_the_end_of_its_log(script, run, follower, capsys, steps):
    if steps:
        train(run, 1)
    lines = [f"line {number}" for number in range(2 * script.TAIL_LINES)]
    log(run, *lines, "Configuration error: sam.gate.threshold = -1: must be at least 0")
    follower.finish()
    told = messages(capsys)[steps:]
    assert str(run.path / "log.txt") in told[0]
    assert told[1:-1] == lines[-script.TAIL_LINES + 1 :]
    assert told[-1].startswith("Configuration error")


def test_the_command_ends_with_the_run(run):
    log(run, LOG["starting Ray"], "boom")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    command = [sys.executable, SCRIPT, run.path, "--pid", str(ended.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "starting Ray" in done.stdout and done.stdout.endswith("boom\n")
