import os
import re
from datetime import datetime
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sam_rollout.config import ConfigError
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.settings_checks import check
from tests.unit.integrations.verl.test_checks import composed
from tests.unit.integrations.verl.test_translation import translated


def left_by(run_dir: Path, started_at: str, *overrides: str, folder: str = "") -> None:
    """Record in `run_dir` that a run with these overrides started in `folder`."""
    config = translated(*overrides, f"run_dir={folder or run_dir}")
    config.transfer_queue.enable = True  # as verl does at the start
    info = RunInfo("a run", OmegaConf.to_container(config, resolve=True), {}, {}, {}, started_at)
    RunFolder(run_dir).write_start(info)


def checkpoint(folder: Path, step: int, written_at: str) -> None:
    """Leave a checkpoint as verl does."""
    (folder / f"global_step_{step}").mkdir(parents=True)
    tracker = folder / "latest_checkpointed_iteration.txt"
    tracker.write_text(str(step))
    seconds = datetime.fromisoformat(written_at).timestamp()
    os.utime(tracker, (seconds, seconds))


def at(hour: int) -> str:
    return f"2026-07-01T{hour:02}:00:00+00:00"


@pytest.fixture
def begun(tmp_path):
    def begin(*overrides: str) -> str:
        left_by(tmp_path / "run", at(1), *overrides)
        checkpoint(tmp_path / "run" / "checkpoints", 40, at(2))
        return f"run_dir={tmp_path}/run"

    return begin


RESUME = "trainer.resume_mode=auto"


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        ("sam=off", "sam=matched", "sam.enabled: False there, True here"),
        ("sam=matched", "sam=on", "sam.gate.kind: closed there, auto here"),
        ("sam=on", "sam=off", "sam.enabled: True there, False here"),
        ("sam.max_draft_tokens=2", "sam=on", "sam.max_draft_tokens: 2 there, 8 here"),
        (
            "rollout_sampler=stock",
            "rollout_sampler=coupled",
            "kind: stock there, coupled here; coupling: none there, gumbel here",
        ),
        *(
            (f"{field}={one}", f"{field}={other}", f"{field}: {one} there, {other} here")
            for field, one, other in (
                ("data.seed", 2, 3),
                ("actor_rollout_ref.model.path", "a/b", "a/c"),
                ("data.train_files", "/a.parquet", "/b.parquet"),
                ("actor_rollout_ref.rollout.n", 4, 8),
                ("data.max_response_length", 512, 1024),
            )
        ),
    ],
)
def test_another_runs_checkpoints_are_not_resumed(begun, first, second, difference):
    where = begun(first)
    with pytest.raises(ConfigError) as caught:
        check(composed(second, where, RESUME))
    assert caught.value.field == "run_dir" and f"{difference})" in caught.value.allowed
    check(composed(second, where, "trainer.resume_mode=disable"))


@pytest.mark.parametrize(
    "overrides",
    [
        ("sam=off", "sam.max_draft_tokens=2"),
        ("sam=on", "sam.sources.prompt.earlier_steps=true"),
        ("sam=on", "sam.gate.kind=schedule", "+sam.gate.schedule={4: 2}"),
        ("sam=on", "actor_rollout_ref.actor.optim.clip_grad=inf"),
        ("sam=on", "data.seed=nan"),  # two NaNs are no change
    ],
)
def test_a_run_is_resumed_with_its_own_settings(begun, overrides):
    where = begun(*overrides)
    check(composed(*overrides, where, RESUME))
    if "sam=off" in overrides:  # without drafts, max_draft_tokens has no effect
        check(composed("sam=off", where, RESUME))


EARLIER = "sam.sources.prompt.earlier_steps=true"


@pytest.mark.parametrize("setting", ["trainer.total_epochs", "trainer.nnodes"])
def test_what_other_settings_decide_of_the_drafts_makes_no_other_run(begun, setting):
    command = ("sam=on", EARLIER, "sam.sources.run.max_bytes=8000000")
    first, then = (composed(*command, f"{setting}={count}") for count in (1, 2))
    assert check(first).sam != check(then).sam
    check(composed(*command, f"{setting}=2", begun(*command, f"{setting}=1"), RESUME))


def test_settings_may_change_while_there_is_no_checkpoint(tmp_path):
    left_by(tmp_path, at(1), "sam=on", "sam.gate.threshold=8")
    command = ("sam=on", "sam.gate.threshold=4", f"run_dir={tmp_path}", RESUME)
    check(composed(*command))
    checkpoint(tmp_path / "checkpoints", 40, at(2))
    with pytest.raises(ConfigError, match=r"sam\.gate\.threshold: 8 there, 4 here"):
        check(composed(*command))
    (tmp_path / "checkpoints" / "global_step_40").rmdir()  # without it, verl finds no checkpoint
    check(composed(*command))


def test_who_wrote_the_checkpoint_decides_not_who_came_last(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    left_by(tmp_path, at(1), "sam=off")
    checkpoint(checkpoints, 40, at(2))
    left_by(tmp_path, at(3), "sam=on")  # this run did not resume and saved nothing
    with pytest.raises(ConfigError, match=r"step 40 .*sam\.enabled: False there, True here"):
        check(composed("sam=on", f"run_dir={tmp_path}", RESUME))
    check(composed("sam=off", f"run_dir={tmp_path}", RESUME))
    checkpoint(checkpoints, 10, at(4))
    check(composed("sam=on", f"run_dir={tmp_path}", RESUME))


def test_a_run_folder_may_move(tmp_path, monkeypatch):
    history = "sam.sources.prompt.earlier_steps=true"
    monkeypatch.chdir(tmp_path)  # relative data paths start here
    left_by(tmp_path / "run", at(1), "sam=on", history, folder="/old/run")
    checkpoint(tmp_path / "run" / "checkpoints", 40, at(2))
    check(composed("sam=on", history, f"run_dir={tmp_path}/run", RESUME))
    check(composed("sam=on", history, "run_dir=run", RESUME))
    elsewhere = "sam.texts.path=/elsewhere"
    with pytest.raises(ConfigError, match=r"texts\.path: <run_dir>/sam/texts there"):
        check(composed("sam=on", history, elsewhere, "run_dir=run", RESUME))


def test_checkpoints_of_a_run_in_another_folder_are_not_resumed(tmp_path):
    shared = f"trainer.default_local_dir={tmp_path}/checkpoints"
    left_by(tmp_path / "off", at(1), "sam=off", shared)
    checkpoint(tmp_path / "checkpoints", 40, at(2))
    check(composed("sam=off", f"run_dir={tmp_path}/off", shared, RESUME))
    command = ("sam=on", f"run_dir={tmp_path}/on", shared, RESUME)
    with pytest.raises(ConfigError, match=r"^trainer\.default_local_dir = .*no file"):
        check(composed(*command))
    left_by(tmp_path / "on", at(3), "sam=on", shared)
    with pytest.raises(ConfigError, match="is later than the checkpoint"):
        check(composed(*command))
    (tmp_path / "on" / "sam" / "run.json").write_text("{")
    with pytest.raises(ConfigError, match="unknown which run wrote it"):
        check(composed(*command))


def test_settings_that_may_change_on_the_way_are_named_in_one_line(begun, capsys):
    where = begun()
    check(composed(where, RESUME))
    assert capsys.readouterr().out == ""
    changed = {
        "actor_rollout_ref.actor.optim.lr": "0.001", "trainer.total_training_steps": "80",
        "data.val_files": "/other.parquet", "actor_rollout_ref.rollout.temperature": "0.9",
    }  # fmt: skip
    check(composed(where, RESUME, *(f"{field}={value}" for field, value in changed.items())))
    (note,) = capsys.readouterr().out.splitlines()
    for field, value in changed.items():
        assert re.search(rf"{field}: \S+ there, {value} here", note), field


def test_another_trainer_mode_is_named_by_a_resumed_run_and_by_a_comparison(tmp_path, capsys):
    left_by(tmp_path, at(1), "sam=off", "dynamic_sampling=refill")
    path = tmp_path / "sam" / "run.json"
    path.write_text(path.read_text().replace('"sam_sync"', '"sync"'))
    RunFolder(tmp_path).append_train_step(1, {"sam/engine/rollout_s": 1.0})
    checkpoint(tmp_path / "checkpoints", 40, at(2))
    for mode, named in (("sam_sync", False), ("sam_colocate_async", True)):
        command = ("dynamic_sampling=refill", f"trainer.v1.trainer_mode={mode}")
        check(composed("sam=off", *command, f"run_dir={tmp_path}", RESUME))
        check(composed("sam=on", *command, f"compare.baseline_run={tmp_path}"))
        notes = capsys.readouterr().out.splitlines()
        found = [note for note in notes if "trainer.v1.trainer_mode: sync" in note]
        assert len(found) == 2 * named
        assert all(f"sync there, {mode} here" in n or f"baseline, {mode}" in n for n in found)
