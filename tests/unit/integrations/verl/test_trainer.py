"""The trainer's hooks around a step's metrics; verl's own parts are stood in for."""

from types import SimpleNamespace

import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from sam_rollout.config import RolloutTelemetryConfig
from sam_rollout.integrations.verl import recording_clock
from sam_rollout.integrations.verl import trainer as module
from sam_rollout.integrations.verl.recording_clock import RecordingClock
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.records import engine_step, engine_steps

INFO = RunInfo("sam=on", {}, {}, {}, {}, "2026-07-01T00:00:00+00:00")


@pytest.fixture
def make_trainer(tmp_path, monkeypatch):
    """A trainer at step 4 with a baseline, made without verl's constructor."""
    monkeypatch.setattr(PPOTrainerSync, "on_train_begin", lambda self: None)
    monkeypatch.setattr(PPOTrainerSync, "on_validate_begin", lambda self: None)
    monkeypatch.setattr(
        PPOTrainerSync,
        "_compute_metrics",
        lambda self, batch, metrics, timing_raw, **_: metrics.update({"timing_s/step": 4.0}),
    )
    base = RunFolder(tmp_path / "base")
    base.write_start(INFO)
    base.append_train_step(4, {"sam/engine/rollout_s": 6.0, "timing_s/step": 8.0})

    def make(curve_every: int, **loggers):
        trainer = object.__new__(module.SamTrainerSync)
        trainer.global_steps = 4
        trainer.logger = SimpleNamespace(logger=loggers)
        trainer.validation_generations_logger = SimpleNamespace(log=_fail)
        trainer.dapo_filtered_reward_logger = SimpleNamespace(log=_fail)
        trainer._telemetry = RolloutTelemetryConfig(curve_every=curve_every)
        trainer._run_folder = RunFolder(tmp_path / "run")
        trainer._run_info = INFO
        trainer._baseline = Baseline(base.path)
        trainer._curve_logger = None
        trainer._recording = RecordingClock()
        trainer._engine_steps = [engine_steps(engine_step(step=4))]
        return trainer

    return make


def _fail(*arguments, **keywords):
    raise BrokenPipeError


class Pictures:
    """A TensorBoard logger's writer."""

    def __init__(self) -> None:
        self.writer, self.shown = self, []

    def add_image(self, tag, image, step, dataformats):
        self.shown.append((tag, step))


def test_a_steps_metrics_hold_the_baselines_and_the_rollout_is_drawn(make_trainer):
    pictures = Pictures()
    trainer = make_trainer(2, tensorboard=pictures, console=None)
    trainer.on_train_begin()
    metrics = {"sam/engine/rollout_s": 3.0}
    trainer._compute_metrics(None, metrics, {})
    assert metrics["compare/speedup_rollout"] == metrics["compare/speedup_step"] == 2.0
    assert trainer._run_folder.read_train_steps()[4] == metrics
    assert pictures.shown == [("sam/engine/running_over_time", 4)]
    assert trainer._engine_steps == [], "held for one step only"


def test_what_recording_costs_is_a_metric_of_the_step(make_trainer, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(recording_clock.time, "perf_counter", lambda: clock.now)

    def takes(seconds, result):
        def call(*arguments, **keywords):
            clock.now += seconds
            return result

        return call

    trainer = make_trainer(0)
    trainer.on_train_begin()
    monkeypatch.setattr(PPOTrainerSync, "on_sample_end", lambda self: None)
    monkeypatch.setattr(PPOTrainerSync, "_validate", takes(5.0, {}))
    monkeypatch.setattr(trainer, "_drain", takes(0.5, {}))
    monkeypatch.setattr(trainer, "_log_curve", takes(0.25, None))
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(val_before_train=True))
    trainer._validate()  # before training: of no step
    trainer.timing_raw = {}
    for _ in range(2):
        trainer.on_sample_end()
        metrics = {}
        trainer._compute_metrics(None, metrics, {})
        assert metrics["sam/telemetry/collect_s"] == 0.5
        assert metrics["sam/telemetry/curve_s"] == 0.25
        assert metrics["sam/telemetry/share"] == 0.75 / 4.0
    assert trainer._run_folder.read_train_steps()[4]["sam/telemetry/collect_s"] == 0.5


def test_a_baseline_that_fails_costs_its_own_metrics(make_trainer, monkeypatch, caplog):
    trainer = make_trainer(0)
    monkeypatch.setattr(trainer._baseline, "metrics", _fail)
    trainer.on_train_begin()
    metrics = {"sam/engine/rollout_s": 3.0}
    trainer._compute_metrics(None, metrics, {})
    assert trainer._run_folder.read_train_steps()[4]["sam/engine/rollout_s"] == 3.0
    assert "compare/speedup_rollout" not in metrics and "baseline" in caplog.text


@pytest.mark.parametrize("curve_every", [0, 3])
def test_other_steps_are_not_drawn(make_trainer, curve_every):
    pictures = Pictures()
    trainer = make_trainer(curve_every, tensorboard=pictures)
    trainer.on_train_begin()
    trainer._compute_metrics(None, {}, {})
    assert pictures.shown == [] and trainer._engine_steps == []


def test_verls_loggers_are_guarded_once_and_only_with_wandb(make_trainer):
    failing = SimpleNamespace(log=_fail, finish=_fail)
    trainer = make_trainer(0, wandb=failing)
    trainer.on_validate_begin()
    guarded = trainer.logger.logger["wandb"]
    trainer.on_train_begin()
    assert trainer.logger.logger["wandb"] is guarded
    guarded.log(data={"x": 1}, step=0)
    trainer.validation_generations_logger.log(["wandb"], [], 0)
    trainer.dapo_filtered_reward_logger.log(["wandb"], {}, 0)
    untouched = make_trainer(0, console=failing)
    untouched.on_train_begin()
    with pytest.raises(BrokenPipeError):
        untouched.validation_generations_logger.log([], [], 0)
