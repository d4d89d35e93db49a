"""Extends verl's loggers by tags and groups in wandb, a TensorBoard layout, and curves.

With verl alone, any error of wandb ends the training. Here, such errors only cause warnings. verl's
``Tracking`` calls ``wandb.init`` without tags and groups. Before this call, `start_wandb` creates
the wandb run with tags and a group; verl's call then returns this run.
"""

import importlib.util
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
from omegaconf import DictConfig, open_dict

from sam_rollout.config import ConfigError, RolloutTelemetryConfig, RunConfig
from sam_rollout.core.json_values import encode
from sam_rollout.core.settings import unknown
from sam_rollout.integrations.verl.check_results import Fact
from sam_rollout.report.panels import SECTIONS
from sam_rollout.report.wandb_workspace import PINNED, STEP_AXIS
from sam_rollout.telemetry.curve import CURVE_NAME, draw, running_curve
from sam_rollout.telemetry.records import RunInfo

logger = logging.getLogger(__name__)

WANDB, TENSORBOARD = "wandb", "tensorboard"
# verl's loggers (verl.utils.tracking.Tracking.supported_backend), each with the package it imports.
PACKAGES = {
    "console": "",
    "file": "",
    "clearml": "clearml",
    "mlflow": "mlflow",
    "rl_insight": "rl_insight",
    "swanlab": "swanlab",
    "tensorboard": "tensorboard",
    "tracking": "wandb",
    "trackio": "trackio",
    "vemlp_wandb": "volcengine_ml_platform",
    "wandb": "wandb",
}
MAX_TAG = 64  # wandb's limit, in characters


def chosen(backends: Any) -> list[str]:
    """Return ``trainer.logger`` as a list; verl also allows a single name."""
    return [backends] if isinstance(backends, str) else list(backends or ())


def check_loggers(backends: Any) -> Iterator[Fact]:
    """Refuse a logger that is unknown or not installed, before verl has loaded a model."""
    names = chosen(backends)
    if not names:
        raise ConfigError("trainer.logger", backends, "must name at least one, such as [console]")
    for name in names:
        if name not in PACKAGES:
            allowed = unknown("logger", name, sorted(PACKAGES))
            raise ConfigError("trainer.logger", names, f"{name}: {allowed}")
        package = PACKAGES[name]
        if package and importlib.util.find_spec(package) is None:
            allowed = f"{name} is not installed: pip install {package}, or leave it out"
            raise ConfigError("trainer.logger", names, allowed)
    yield Fact(", ".join(names))


def wandb_arguments(config: DictConfig, run: RunConfig, info: RunInfo) -> dict[str, Any]:
    """Return the arguments of ``wandb.init``: verl's own, and tags and groups for comparisons."""
    side = info.label.partition("=")[2]
    experiment, folder = config.trainer.experiment_name, Path(config.run_dir).name
    tags = [
        f"sam:{side}",
        f"sampler:{run.sampler.kind}",
        f"device:{config.trainer.device}",
        f"experiment:{experiment}",
        *filter(None, os.environ.get("WANDB_TAGS", "").split(",")),
    ]
    names = ("label", "versions", "seeds", "host", "started_at", "git")
    described = {name: getattr(info, name) for name in names}
    return {
        "project": config.trainer.project_name,
        "name": experiment if folder == experiment else f"{experiment} {folder}",
        "config": encode({**info.config, "sam_run": described}),
        "tags": [tag[:MAX_TAG] for tag in tags],
        "group": run.compare.group or None,  # None: wandb reads WANDB_RUN_GROUP
        "job_type": os.environ.get("WANDB_JOB_TYPE", info.label),
    }


def start_wandb(config: DictConfig, run: RunConfig, info: RunInfo) -> None:
    """Create the wandb run that verl will use; if that fails, record offline or without wandb."""
    if WANDB not in chosen(config.trainer.logger):
        return
    try:
        import wandb

        arguments = wandb_arguments(config, run, info)
        proxy = config.trainer.get("wandb_proxy", None)
        settings = wandb.Settings(https_proxy=proxy) if proxy else None
        try:
            made = wandb.init(**arguments, settings=settings)
        except Exception as error:
            logger.warning(
                "wandb cannot be reached (%s: %s); the run is recorded below %s, upload it with "
                "'wandb sync'.", type(error).__name__, error, os.environ.get("WANDB_DIR", "wandb"),
            )  # fmt: skip
            made = wandb.init(**arguments, mode="offline")
        made.define_metric(STEP_AXIS)
        made.define_metric("*", step_metric=STEP_AXIS)
        for name in PINNED:  # the workspace's table of runs shows the means of these metrics
            made.define_metric(name, step_metric=STEP_AXIS, summary="mean,last")
    except Exception:
        others = [name for name in chosen(config.trainer.logger) if name != WANDB]
        logger.warning("wandb failed; the run goes on with the loggers %s.", others, exc_info=True)
        with open_dict(config):
            config.trainer.logger = others or ["console"]


class OnceWarning:
    """Runs functions and catches their errors; only the first error is logged."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._said = False

    def __call__(self, call: Callable[..., object], *arguments: Any, **keywords: Any) -> None:
        try:
            call(*arguments, **keywords)
        except Exception:
            if not self._said:
                logger.warning("%s; training goes on.", self._what, exc_info=True)
            self._said = True


class GuardedWandb:
    """Wraps verl's wandb logger, so that errors of wandb do not end the training."""

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb
        self._guard = OnceWarning("wandb takes no more metrics")

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Log metrics with the training step, which verl leaves out in the first validation."""
        self._guard(self._wandb.log, data={STEP_AXIS: step, **data}, step=step)

    def alert(self, title: str, text: str) -> None:
        self._guard(self._wandb.alert, title=title, text=text, level="WARN")

    def finish(self, exit_code: int = 0) -> None:
        self._guard(self._wandb.finish, exit_code=exit_code)


def tensorboard_layout() -> dict[str, dict[str, list]]:
    """Return the sections and panels of TensorBoard's tab "custom scalars"."""
    return {
        section.title: {
            panel.title: [
                "Multiline",
                [panel.pattern] if panel.pattern else [f"^{re.escape(n)}$" for n in panel.metrics],
            ]
            for panel in section.panels
            if not panel.picture
        }
        for section in SECTIONS
    }


class CurveLogger:
    """Draws how many requests run in the course of a rollout; also sets TensorBoard's layout."""

    def __init__(self, loggers: Mapping[str, Any], telemetry: RolloutTelemetryConfig) -> None:
        self._loggers, self._tail_threshold = loggers, telemetry.tail_threshold
        self._every = telemetry.curve_every if {WANDB, TENSORBOARD} & loggers.keys() else 0
        self._guard = OnceWarning("The running requests over time cannot be drawn")
        if TENSORBOARD in loggers:
            writer, guard = loggers[TENSORBOARD].writer, OnceWarning("TensorBoard gets no layout")
            guard(lambda: writer.add_custom_scalars(tensorboard_layout()))

    def log(self, engine_steps: list[pa.Table], title: str, step: int) -> None:
        """Draw and log a rollout's curve, if the setting `curve_every` asks for it in this step."""
        if engine_steps and self._every and step % self._every == 0:
            self._guard(self._log, engine_steps, title, step)

    def _log(self, engine_steps: list[pa.Table], title: str, step: int) -> None:
        curve = running_curve(engine_steps, tail_threshold=self._tail_threshold)
        if curve is None:
            return
        image = draw(curve, title)
        if TENSORBOARD in self._loggers:
            writer = self._loggers[TENSORBOARD].writer
            writer.add_image(CURVE_NAME, image, step, dataformats="HWC")
        if WANDB in self._loggers:
            import wandb

            self._loggers[WANDB].log({CURVE_NAME: wandb.Image(image, caption=title)}, step)
