import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "compare.sh"

STUB = """
import json, os, sys, time
from pathlib import Path
from sam_rollout.telemetry.records import RunFolder, RunInfo

options = dict(word.partition("=")[::2] for word in sys.argv[1:])
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
folder = RunFolder(options["run_dir"])
config = {"trainer": {"total_training_steps": 1}}
folder.write_start(RunInfo("sam=off", config, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
name = folder.path.name
print("training", name, flush=True)
if name in os.environ.get("CHECKPOINT", "").split(","):
    (folder.path / "checkpoints").mkdir(exist_ok=True)
    (folder.path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("1")
if name in os.environ.get("HANG", "").split(","):
    time.sleep(60)
if name in os.environ.get("FAIL", "").split(","):
    sys.exit("out of memory")
folder.append_train_step(1, {"timing_s/step": 1.0})
"""


class Script:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "cmp"
        self.calls_path = folder / "calls.jsonl"
        stub = folder / "stub.py"
        stub.write_text(STUB)
        self.environment = {
            **os.environ,
            "PYTHON": sys.executable,
            "LAUNCH": f"{sys.executable} {stub}",
            "COMPARE": "echo COMPARE",
            "CALLS": str(self.calls_path),
            "OUTPUT_DIR": str(self.output),
        }

    def command(self, *words: str) -> list[str]:
        return ["bash", str(SCRIPT), "experiment=tiny_cpu", *words]

    def __call__(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            self.command(*words), env={**self.environment, **variables}, timeout=60,
            capture_output=True, text=True,
        )  # fmt: skip

    @property
    def calls(self) -> list[dict[str, str]]:
        lines = self.calls_path.read_text().splitlines() if self.calls_path.exists() else []
        return [dict(w.partition("=")[::2] for w in json.loads(line)) for line in lines]

    @property
    def started(self) -> list[str]:
        return [Path(call["run_dir"]).name for call in self.calls]


@pytest.fixture
def script(tmp_path):
    return Script(tmp_path)


def test_both_sides_run_in_turn_and_are_compared(script):
    done = script("repeats=2", "trainer.total_training_steps=4", "data.files=[a,b]")
    assert done.returncode == 0, done.stderr
    assert script.started == ["base-1", "sam-1", "base-2", "sam-2"]
    assert [call["sam"] for call in script.calls] == ["off", "on", "off", "on"]
    for key in ("data.seed", "actor_rollout_ref.rollout.seed"):
        assert [call[key] for call in script.calls] == ["1", "1", "2", "2"]
    out = script.output
    assert [call.get("compare.baseline_run") for call in script.calls] == [
        None, f"{out}/base-1", None, f"{out}/base-2",
    ]  # fmt: skip
    assert {call["compare.group"] for call in script.calls} == {"cmp"}
    assert {call["data.files"] for call in script.calls} == {"[a,b]"}
    assert done.stdout.splitlines()[-2] == (
        f"COMPARE {out}/base-1 {out}/base-2 --with {out}/sam-1 --with {out}/sam-2 "
        f"--skip-first 1 --html {out}/comparison.html --json {out}/comparison.json"
    )
    assert "[4/4] sam-2: done in" in done.stdout
    assert "training base-1" in (out / "base-1" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("words", "skipped"),
    [
        ([], "1"),  # base goes first: the warm-up of its first step must not count as a gain
        (["skip_first=2", "trainer.total_training_steps=3"], "2"),
        (["trainer.total_training_steps=1"], "0"),
    ],
)
def test_first_steps_are_left_out_if_there_are_others(script, words, skipped):
    done = script("--dry-run", "repeats=1", *words)
    assert f"'--skip-first' '{skipped}'" in done.stdout
    assert "skip_first" not in done.stdout, "it is no override of a run"
    assert not script.output.exists() and script.started == []


def test_a_failed_run_is_named_and_the_rest_kept(script):
    done = script("repeats=2", FAIL="sam-1")
    log = script.output / "sam-1" / "log.txt"
    assert done.returncode == 1
    assert f"sam-1 failed with status 1; its log: {log}" in done.stderr
    assert "out of memory" in done.stdout, "the end of its log is shown"
    again = script("repeats=2")
    assert again.returncode == 0, again.stderr
    assert script.started == ["base-1", "sam-1", "sam-1", "base-2", "sam-2"]
    assert "base-1: finished, kept" in again.stdout
    assert "sam-1: was interrupted without a checkpoint, begins again" in again.stdout
    left = script.output / "sam-1.unfinished-1" / "log.txt"
    assert "out of memory" in left.read_text() and "out of memory" not in log.read_text()


def test_a_run_with_a_checkpoint_goes_on_in_its_folder(script):
    script("repeats=1", FAIL="base-1", CHECKPOINT="base-1")
    again = script("repeats=1")
    assert again.returncode == 0, again.stderr
    assert "base-1: goes on from its checkpoint" in again.stdout
    assert script.calls[1]["trainer.resume_mode"] == "auto"
    assert not (script.output / "base-1.unfinished-1").exists()
    assert (script.output / "base-1" / "log.txt").read_text().count("training base-1") == 2


def test_more_repeats_are_added_and_other_words_refused(script):
    assert script("repeats=1", "a=1").returncode == 0
    more = script("repeats=2", "a=1")
    assert more.returncode == 0 and script.started == ["base-1", "sam-1", "base-2", "sam-2"]
    other = script("repeats=2", "a=2")
    assert other.returncode == 1
    assert "holds another comparison" in other.stderr and "> a=2" in other.stderr
    assert len(script.started) == 4


def test_an_interrupt_ends_the_run_that_is_under_way(script):
    process = subprocess.Popen(
        script.command("repeats=1"), env={**script.environment, "HANG": "base-1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        _wait_for(lambda: script.started == ["base-1"])
        second = script("repeats=1")
        assert "another comparison is running" in second.stderr
        process.send_signal(signal.SIGTERM)  # only to the script
        process.communicate(timeout=30)
        assert process.returncode != 0
        _wait_for(lambda: not _alive(f"run_dir={script.output}/base-1"))
    finally:
        process.kill()
    assert not (script.output / "base-1" / ".finished").exists()


def test_a_run_that_hangs_is_stopped(script):
    done = script("repeats=1", HANG="base-1", TIMEOUT_S="4")
    assert done.returncode == 1
    assert "base-1 was stopped after 4 s" in done.stderr


def _wait_for(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _alive(word: str) -> bool:
    done = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True)
    return any(word in line for line in done.stdout.splitlines())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.seed=3"], "data.seed=3: this script sets it, another one for each pair"),
        (["repeats=0"], "repeats=0: must be a number from 1 on"),
        (
            ["skip_first=3", "trainer.total_training_steps=3"],
            "skip_first=3 leaves nothing to compare of trainer.total_training_steps=3",
        ),
        (["experiment="], "which experiment?"),
    ],
)
def test_wrong_usage_is_one_line(script, words, message):
    done = script(*words)
    assert done.returncode == 1 and script.started == []
    assert done.stderr.startswith(f"error: {message}") and len(done.stderr.splitlines()) == 1
