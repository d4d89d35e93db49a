"""The trainer's hooks around a step's metrics; verl's own parts are stood in for."""

import time
from types import SimpleNamespace

import pytest
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from sam_rollout.config import RolloutTelemetryConfig, SentinelConfig
from sam_rollout.integrations.verl import trainer as module
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.records import RunFolder, RunInfo
from sam_rollout.telemetry.sentinel import Sentinel
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
        trainer._engine_steps = [engine_steps(engine_step(step=4))]
        trainer._sentinel, trainer._reports = None, []
        trainer.replay_buffer = SimpleNamespace()
        return trainer

    return make


def _fail(*arguments, **keywords):
    raise BrokenPipeError


@pytest.fixture
def watched(make_trainer, monkeypatch):
    """A trainer with a sentinel."""

    def watch(**loggers):
        trainer = make_trainer(0, **loggers)
        trainer._sentinel = Sentinel(SentinelConfig())
        trainer._responses = SimpleNamespace(metrics=lambda batch: {})
        trainer.on_train_begin()
        return trainer

    return watch


def sentinels(metrics) -> set[str]:
    prefix = "sam/sentinel/"
    return {name.removeprefix(prefix) for name, on in metrics.items() if prefix in name and on}


class Wandb:
    """The module, with a run or without."""

    def __init__(self, run=None, alert=None) -> None:
        self.run, self.sent = run, []
        self.alert = alert or (lambda **options: self.sent.append(options))


def test_a_finding_is_said_in_the_log_and_to_wandb_once(watched, caplog):
    wandb = Wandb(run=object())
    trainer = watched(wandb=wandb)
    for _ in range(2):
        metrics = {"response_length/mean": 9.0}  # and nobody reported anything
        trainer._compute_metrics(None, metrics, {})
        assert trainer._run_folder.read_train_steps()[4]["sam/sentinel/counters_missing"] == 1
    (line,) = [one.message for one in caplog.records if "Sentinel" in one.message]
    assert "training step 4: counters_missing" in line
    assert [(one["title"], one["level"]) for one in wandb.sent] == [
        ("sam_rollout: counters_missing", "WARN")
    ]
    assert wandb.sent[0]["text"] in line


@pytest.mark.parametrize("loggers", [{}, {"wandb": Wandb()}, {"wandb": Wandb(object(), _fail)}])
def test_a_finding_needs_no_wandb(watched, loggers, caplog):
    trainer, metrics = watched(**loggers), {"response_length/mean": 9.0}
    trainer._compute_metrics(None, metrics, {})
    assert sentinels(metrics) == {"counters_missing"}
    assert "Sentinel" in caplog.text
    assert not any(getattr(one, "sent", []) for one in loggers.values())


def test_a_sentinel_that_fails_costs_its_own_metrics(watched, monkeypatch, caplog):
    trainer, metrics = watched(), {}
    monkeypatch.setattr(trainer._sentinel, "look", _fail)
    trainer._compute_metrics(None, metrics, {})
    assert metrics["timing_s/step"] == 4.0 and not any("sentinel" in name for name in metrics)
    assert "not looked at by the sentinel" in caplog.text


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


def test_a_head_learns_for_its_share_of_the_last_step_and_is_saved_at_the_end(
    make_trainer, monkeypatch, capsys
):
    monkeypatch.setattr(PPOTrainerSync, "_compute_old_log_prob", lambda self, batch, metrics: batch)
    monkeypatch.setattr(PPOTrainerSync, "on_step_end", lambda self: None)
    monkeypatch.setattr(PPOTrainerSync, "on_train_end", lambda self: None)
    granted, saved = [], []

    def train_head(seconds):
        granted.append(seconds)
        return [{"time_s": 0.2, "length": 2.5, "first_length": 2.0}, {"time_s": 0.5}]

    trainer = make_trainer(0)
    trainer._trains_head = True
    trainer._responses = SimpleNamespace(metrics=lambda batch: {})
    train = SimpleNamespace(budget=0.25)
    sources = SimpleNamespace(model=SimpleNamespace(train=train))
    trainer._run = SimpleNamespace(sam=SimpleNamespace(sources=sources))
    trainer.config = SimpleNamespace(trainer=SimpleNamespace(default_local_dir="/saved"))
    trainer.actor_rollout_wg = SimpleNamespace(train_head=train_head, save_head=saved.append)
    trainer.timing_raw, trainer.total_training_steps = {}, 5
    trainer._step_began_s = time.perf_counter() - 100
    for number in (4, 5):
        trainer.global_steps = number
        metrics = {"sam/draft/accepted_model": 30.0, "sam/engine/rollout_s": 2.0}
        assert trainer._compute_old_log_prob("batch", metrics) == "batch"
        assert "train_head" in trainer.timing_raw
        trainer._compute_metrics(None, metrics, {})  # of a step that took 4 s
        assert metrics["sam/head_training/length"] == 2.5
        assert metrics["sam/head_training/share"] == 0.5 / 4
        trainer.on_step_end()
    # The first step is not over when the head learns in it.
    assert granted[0] == pytest.approx(25, rel=0.1) and granted[1] == 1
    assert saved == ["/saved/draft_head"]
    assert "The trained draft head: /saved/draft_head" in capsys.readouterr().out
