"""Sets the environment variables of a run's processes, on every node."""

import os
from pathlib import Path

from omegaconf import DictConfig, open_dict

from sam_rollout.config import RunConfig
from sam_rollout.integrations.vllm.batch_invariance import BATCH_INVARIANT_ENV
from sam_rollout.integrations.vllm.engine_settings import MODEL_RUNNER_ENV

EXTERNAL_MODULES_ENV = "VERL_USE_EXTERNAL_MODULES"
PLUGIN_MODULE = "sam_rollout.integrations.verl.plugin"


def experiment_variables(config: DictConfig) -> dict[str, str]:
    """Return the environment variables to which the experiment assigns a value other than null."""
    given = config.get("environment", {})
    return {name: str(value) for name, value in given.items() if value is not None}


def run_variables(config: DictConfig) -> dict[str, str]:
    """Return the shell's environment variables, and variables that only the experiment sets."""
    return {**experiment_variables(config), **os.environ}


def environment_notes(config: DictConfig) -> list[str]:
    """Return a note for each variable that the shell and the experiment set differently."""
    return [
        f"{name}={os.environ[name]} is set in the shell and wins; the experiment says {value} "
        f"(unset {name} to use that)"
        for name, value in experiment_variables(config).items()
        if os.environ.get(name, value) != value
    ]


def environment(config: DictConfig, run: RunConfig) -> dict[str, str]:
    """Return the environment variables of the run's processes; the shell's values win."""
    run_dir = Path(config.run_dir).absolute()
    variables = {
        "TENSORBOARD_DIR": str(run_dir / "tensorboard"),
        "WANDB_DIR": str(run_dir),
        "VERL_FILE_LOGGER_PATH": str(run_dir / "metrics.jsonl"),
        **experiment_variables(config),
    }
    if run.sampler.kind != "stock" or run.sam.drafts_with_model:
        variables[MODEL_RUNNER_ENV] = "0"
    if run.sampler.batch_invariant:
        variables[BATCH_INVARIANT_ENV] = "1"
    modules = filter(None, [*os.environ.get(EXTERNAL_MODULES_ENV, "").split(","), PLUGIN_MODULE])
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return variables | {EXTERNAL_MODULES_ENV: ",".join(modules)}


def export_environment(config: DictConfig, run: RunConfig) -> None:
    """Set the run's environment variables in this process and in every process of the Ray cluster.

    Call this before verl is imported.
    """
    variables = environment(config, run)
    os.environ.update(variables)
    with open_dict(config):
        config.run_dir = str(Path(config.run_dir).absolute())
        runtime_env = config.ray_kwargs.ray_init.runtime_env
        given = runtime_env.get("env_vars", {})
        runtime_env.env_vars = {**variables, **given}
