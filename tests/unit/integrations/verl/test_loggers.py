import logging
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from omegaconf import OmegaConf

from sam_rollout.config import CompareConfig, ConfigError, RunConfig
from sam_rollout.integrations.verl import loggers
from sam_rollout.report.panels import SECTIONS
from sam_rollout.telemetry.records import RunInfo
from tests.records import engine_step, engine_steps

RUN = RunConfig(compare=CompareConfig(group="cmp"))


class FakeWandb(ModuleType):
    def __init__(self, *fails: str) -> None:
        super().__init__("wandb")
        self.fails = fails
        self.calls: list[dict] = []
        self.defined: list[tuple] = []
        self.Settings = lambda **values: values

    def init(self, mode: str = "online", **arguments):
        self.calls.append({"mode": mode, **arguments})
        if mode in self.fails:
            raise ConnectionError(f"no way {mode}")
        return SimpleNamespace(
            define_metric=lambda *names, **options: self.defined.append((*names, options))
        )


@pytest.fixture(autouse=True)
def shell(monkeypatch):
    for name in ("WANDB_TAGS", "WANDB_RUN_GROUP", "WANDB_JOB_TYPE", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def config():
    names = {"project_name": "sam_rollout", "experiment_name": "tiny_cpu"}
    trainer = {"logger": ["console", "wandb"], "device": "cpu", **names}
    return OmegaConf.create({"run_dir": "/runs/cmp/sam-1", "trainer": trainer})


def info(config) -> RunInfo:
    plain = OmegaConf.to_container(config)
    return RunInfo("sam=on", plain, {"verl": "0.9.1"}, {"rollout": 1}, {},
                   "2026-07-01T00:00:00+00:00", {"commit": "abc", "dirty": False})  # fmt: skip


@pytest.fixture
def wandb(monkeypatch):
    def install(*fails: str) -> FakeWandb:
        module = FakeWandb(*fails)
        monkeypatch.setitem(sys.modules, "wandb", module)
        return module

    return install


def test_a_run_can_be_found_again(config, wandb, monkeypatch):
    module = wandb()
    monkeypatch.setenv("WANDB_TAGS", "mine,paper")
    loggers.start_wandb(config, RUN, info(config))
    (call,) = module.calls
    assert call["tags"] == [
        "sam:on", "sampler:coupled", "device:cpu", "experiment:tiny_cpu", "mine", "paper",
    ]  # fmt: skip
    assert (call["group"], call["job_type"]) == ("cmp", "sam=on")
    assert (call["project"], call["name"]) == ("sam_rollout", "tiny_cpu sam-1")
    assert call["config"]["trainer"]["experiment_name"] == "tiny_cpu"
    assert call["config"]["sam_run"]["versions"] == {"verl": "0.9.1"}
    assert call["config"]["sam_run"]["git"] == {"commit": "abc", "dirty": False}
    assert ("*", {"step_metric": "training/global_step"}) in module.defined
    assert loggers.wandb_arguments(config, RunConfig(), info(config))["group"] is None


def test_wandb_need_not_be_installed_where_it_is_not_chosen(config, monkeypatch):
    config.trainer.logger = ["console", "tensorboard"]
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it fails
    loggers.start_wandb(config, RUN, info(config))
    assert config.trainer.logger == ["console", "tensorboard"]


def test_a_server_out_of_reach_makes_it_offline(config, wandb, caplog):
    module = wandb("online")
    loggers.start_wandb(config, RUN, info(config))
    assert [call["mode"] for call in module.calls] == ["online", "offline"]
    assert "wandb cannot be reached (ConnectionError: no way online)" in caplog.text
    assert config.trainer.logger == ["console", "wandb"]


@pytest.mark.parametrize("backends", [["wandb", "file"], "wandb"])
def test_without_any_run_the_others_go_on(config, wandb, caplog, backends):
    wandb("online", "offline")
    config.trainer.logger = backends
    loggers.start_wandb(config, RUN, info(config))
    assert config.trainer.logger == (["file"] if "file" in backends else ["console"])
    assert "wandb failed" in caplog.text


def test_a_logger_must_be_installed_where_it_is_chosen(monkeypatch):
    monkeypatch.setattr(loggers.importlib.util, "find_spec", lambda name: None)
    list(loggers.check_loggers(["console", "file"]))
    for backends in ("wandb", ["console", "swanlab"], ["console", "mlflow"]):
        name = loggers.chosen(backends)[-1]
        with pytest.raises(ConfigError, match=rf"trainer\.logger = .*{name} is not installed"):
            list(loggers.check_loggers(backends))
    with pytest.raises(ConfigError, match="tensorbord: unknown logger; did you mean 'tensorboard'"):
        list(loggers.check_loggers(["tensorbord"]))


def test_the_loggers_are_those_of_verl():
    tracking = pytest.importorskip("verl.utils.tracking")
    assert {*tracking.Tracking.supported_backend, "tracking"} == loggers.PACKAGES.keys()


def test_errors_while_training_are_said_once(caplog):
    def fail(**keywords):
        raise BrokenPipeError("service died")

    guarded = loggers.GuardedWandb(SimpleNamespace(log=fail, finish=fail))
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            guarded.log(data={"sam/tail/time_s": 1.0}, step=step)
        guarded.finish(exit_code=0)
    assert caplog.text.count("training goes on") == 1


def test_the_step_goes_along_with_validation():
    logged = []
    wandb = SimpleNamespace(log=lambda data, step: logged.append((data, step)))
    loggers.GuardedWandb(wandb).log(data={"val-core/x": 1.0}, step=0)
    loggers.GuardedWandb(wandb).log(data={"training/global_step": 7}, step=7)
    assert logged == [
        ({"training/global_step": 0, "val-core/x": 1.0}, 0), ({"training/global_step": 7}, 7),
    ]  # fmt: skip


def test_a_curve_that_cannot_be_drawn_ends_nothing(caplog):
    curve_logger = loggers.CurveLogger({"tensorboard": SimpleNamespace(writer=None)}, RUN.telemetry)
    curve_logger.log([], "title", 1)  # a step without records
    assert "cannot be drawn" not in caplog.text
    curve_logger.log([engine_steps(engine_step())], "title", 2)
    curve_logger.log([object()], "title", 3)
    others = {"console": None, "file": None}
    loggers.CurveLogger(others, RUN.telemetry).log([object()], "title", 4)
    assert caplog.text.count("cannot be drawn; training goes on") == 1
    assert caplog.text.count("TensorBoard gets no layout; training goes on") == 1


def test_tensorboard_gets_our_sections(tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(tmp_path)
    loggers.CurveLogger({"tensorboard": SimpleNamespace(writer=writer)}, RUN.telemetry)
    writer.close()
    (path,) = tmp_path.iterdir()
    (value,) = [v for event in EventFileLoader(str(path)).Load() for v in event.summary.value]
    assert value.tag == metadata.CONFIG_SUMMARY_TAG
    read = layout_pb2.Layout()
    read.ParseFromString(value.tensor.string_val[0])
    assert [category.title for category in read.category] == [s.title for s in SECTIONS]
    charts = {chart.title: list(chart.multiline.tag) for c in read.category for chart in c.chart}
    assert charts["Speed-up of all rollouts so far"] == ["^compare/speedup_rollout_so_far$"]
    assert "Running requests over time" not in charts
    for tags in charts.values():
        assert all(re.compile(tag) for tag in tags)
