"""verl's loggers as our trainer uses them: the same names in wandb, TensorBoard and verl's file."""

import json
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl.utils.tracking import Tracking

from recipes.dapo_qwen3.main import REPOSITORY
from sam_rollout.integrations.verl.loggers import (
    MEAN_IN_SUMMARY,
    CurveLogger,
    GuardedWandb,
    start_wandb,
)
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.verl.run_info import collect_run_info
from sam_rollout.integrations.verl.translation import translate
from sam_rollout.telemetry.curve import CURVE_NAME, LINE_NAME
from tests.integration.wandb_file import read_wandb
from tests.records import engine_step, engine_steps

STEPS = {
    0: {"val-core/gsm8k/acc/mean@1": 0.25, "sam_val/engine/rollout_s": 2.0},
    1: {"sam/engine/rollout_s": 4.0, "timing_s/step": 9.0, "training/global_step": 1},
    2: {"sam/engine/rollout_s": 2.0, "timing_s/step": 7.0, "training/global_step": 2},
}


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run of two steps and validation before them, through all three loggers."""
    folder = tmp_path_factory.mktemp("run")
    with initialize_config_dir(str(REPOSITORY / "configs"), version_base="1.3"):
        config = compose(
            "dapo_qwen3",
            overrides=[
                "experiment=tiny_cpu",
                f"run_dir={folder}",
                "compare.group=cmp",
                "trainer.logger=[tensorboard,file,wandb]",
            ],
        )
    run = read_run_config(config)
    translate(config, run)
    plain = OmegaConf.to_container(config)
    info = collect_run_info(config, run.sam)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_DIR", str(folder))
        patch.setenv("TENSORBOARD_DIR", str(folder / "tensorboard"))
        patch.setenv("VERL_FILE_LOGGER_PATH", str(folder / "metrics.jsonl"))
        start_wandb(config, run, info)
        tracking = Tracking("sam_rollout", "tiny_cpu", list(config.trainer.logger), plain)
        tracking.logger["wandb"] = GuardedWandb(tracking.logger["wandb"])
        curves = CurveLogger(tracking.logger, 8)
        for step, metrics in STEPS.items():
            if step:
                curves.log([engine_steps(engine_step())], "sam=on", step)
            tracking.log(metrics, step)
        tracking.finish()
    files = list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 1, "verl's own wandb.init made no second run"
    return SimpleNamespace(folder=folder, wandb=read_wandb(files[0]))


def test_all_loggers_have_the_same_names_at_the_same_steps(logged):
    lines = (logged.folder / "metrics.jsonl").read_text().splitlines()
    by_file = {row["step"]: set(row["data"]) for row in map(json.loads, lines)}
    assert by_file == {step: set(metrics) for step, metrics in STEPS.items()}
    events = EventAccumulator(str(logged.folder / "tensorboard")).Reload()
    by_tensorboard = {step: set() for step in STEPS}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            by_tensorboard[event.step].add(tag)
    assert by_tensorboard == by_file
    own = {CURVE_NAME, f"{LINE_NAME}_table", "training/global_step"}
    for step, row in logged.wandb.history.items():
        names = {name for name in row if not name.startswith("_")}
        assert names - own == by_file[step] - own, step
        assert row["training/global_step"] == step


def test_the_picture_of_every_step_is_there(logged):
    events = EventAccumulator(str(logged.folder / "tensorboard"), {"images": 0}).Reload()
    assert [image.step for image in events.Images(CURVE_NAME)] == [1, 2]
    for step in (1, 2):
        image = logged.wandb.history[step][CURVE_NAME]
        assert image["_type"] == "image-file" and image["width"] == 576
    assert len(list(logged.folder.glob("wandb/offline-run-*/files/media/images/**/*.png"))) == 2


def test_the_wandb_run_can_be_found_and_grouped(logged):
    run = logged.wandb.run
    assert (run.project, run.display_name) == ("sam_rollout", f"tiny_cpu {logged.folder.name}")
    assert (run.run_group, run.job_type) == ("cmp", "sam=on")
    assert list(run.tags) == [
        "sam:on", "sampler:coupled", "device:cpu", "experiment:tiny_cpu",
    ]  # fmt: skip
    assert logged.wandb.config["sam_run"]["label"] == "sam=on"
    assert "git" in logged.wandb.config["sam_run"]
    gate = logged.wandb.config["sam"]["gate"]
    assert gate["kind"] == "auto"


def test_the_training_step_is_the_axis_and_times_are_summed_up_by_their_mean(logged):
    metrics = logged.wandb.metrics
    for name in ("sam/engine/rollout_s", "*"):
        assert metrics[name].step_metric == "training/global_step"
    assert metrics["sam/engine/rollout_s"].summary.mean
    assert "sam/engine/rollout_s" in MEAN_IN_SUMMARY
    assert logged.wandb.summary["sam/engine/rollout_s"] == {"last": 2.0, "mean": 3.0}
