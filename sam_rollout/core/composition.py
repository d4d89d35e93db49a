"""Composes an experiment with Hydra, and explains Hydra's errors in one line.

A recipe registers an entry point of the group `sam_rollout.recipes`. The entry point's name is also
the name of the root configuration in the folder `configs` beside the recipe's module. verl's
configuration files are found without importing verl, because importing verl would choose a device.
Hydra is slow to import, so it is imported inside functions.
"""

import importlib.util
import os
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

from sam_rollout.core.settings import GONE, NEVER_FOR_ROLLOUTS, unknown

GROUP, RECIPE = "sam_rollout.recipes", "dapo_qwen3"


class ExperimentError(RuntimeError):
    """An experiment cannot be composed; the message says why in one line."""

    fix = "sam-rollout install cpu, cuda or ascend; in a checkout scripts/install.sh"


class RefusedError(ExperimentError):
    """Hydra refuses an override, or a configuration file."""

    fix = "correct the override; sam-rollout train --cfg job ... shows all settings"


def recipe() -> EntryPoint:
    """Return the entry point of the recipe."""
    found = entry_points(group=GROUP, name=RECIPE)
    if not found:
        raise ExperimentError(f"no recipe {RECIPE} is installed (entry point of {GROUP})")
    return next(iter(found))


def recipe_folder() -> Path:
    """Return the folder of the recipe's module without importing it."""
    module = recipe().module
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ExperimentError(f"the recipe {module} is declared but does not exist")
    return Path(spec.origin).parent


def prepare(folder: Path) -> None:
    """Make verl's configuration and a recipe's paths known to Hydra."""
    from omegaconf import OmegaConf

    try:
        verl = importlib.util.find_spec("verl")
    except (ImportError, ValueError):  # verl was only partly removed
        verl = None
    if verl is None or not verl.submodule_search_locations:
        raise ExperimentError(
            "verl is not installed in this environment, and its configuration is part of every run"
        )
    config = Path(verl.submodule_search_locations[0]) / "trainer" / "config"
    os.environ["VERL_CONFIG_DIR"] = str(config)
    # `${recipe:PATH}` stands for PATH below the recipe's folder, `${here:PATH}` for PATH below the
    # working directory.
    OmegaConf.register_new_resolver("recipe", lambda path: str(folder / path), replace=True)
    OmegaConf.register_new_resolver("here", lambda path: str(Path(path).absolute()), replace=True)


def compose(*overrides: str) -> tuple[dict[str, Any], str]:
    """Compose the configuration of a run with these overrides.

    Returns the configuration as plain values, and the option that was chosen for `device`.

    Raises:
        RefusedError: An override or a configuration file is wrong.
        ExperimentError: The recipe or verl is missing.
    """
    folder = recipe_folder()
    prepare(folder)

    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(str(folder / "configs"), version_base="1.3"):
            config = compose(RECIPE, list(overrides), return_hydra_config=True)
        device = str(config.hydra.runtime.choices.device)
        # Hydra's own settings cannot be resolved outside a run.
        ours = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        return cast(dict[str, Any], OmegaConf.to_container(ours, resolve=True)), device
    except (HydraException, OmegaConfBaseException) as error:
        raise RefusedError(explain(error)) from error


def explain(error: Exception) -> str:
    """Describe an error of Hydra or OmegaConf in one line, with the names that are allowed."""
    from hydra.errors import MissingConfigException, OverrideParseException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        why = NEVER_FOR_ROLLOUTS.get(option) or unknown("option", option, sorted(error.options))
        return f"{group} = {option!r}: {why}"
    if isinstance(error, OverrideParseException):
        return _explain_override(error)
    cause = error.__cause__ or error
    if isinstance(cause, ConfigAttributeError | ConfigKeyError) and cause.parent_node is not None:
        known = {str(key) for key in getattr(cause.parent_node, "keys", list)()}
        if "." not in str(cause.full_key):  # names of groups are allowed, too
            configs = recipe_folder() / "configs"
            known |= {path.name for path in configs.iterdir() if path.is_dir()}
        if not known:
            parent = str(cause.full_key).rpartition(".")[0]
            return f"{cause.full_key}: {parent} holds no keys; set it as a whole: {parent}=..."
        why = GONE.get(str(cause.full_key)) or unknown("key", str(cause.key), sorted(known))
        return f"{cause.full_key}: {why}"
    said = [str(error), *([str(error.__cause__)] if error.__cause__ else [])]
    return " ".join(" ".join(said).split())


def _explain_override(error: Any) -> str:
    key, is_assigned, value = error.override.partition("=")
    if not is_assigned:
        said = " ".join(str(error).split())
        return f"{key}: must be KEY=VALUE, or an option that --help lists ({said})"
    if set(value) & set("=:,(){}[] ") and not value.startswith(("'", '"', "{", "[", "(")):
        quoted = value.replace('"', '\\"')
        return (
            f"{key} = {value!r}: a value with = : , ( ) {{ }} [ ] or a space needs quotes for "
            f"Hydra, and others for the shell: '{key}=\"{quoted}\"'"
        )
    said = " ".join(str(error.__cause__ or error).split())
    return f"{key} = {value!r}: is not written as Hydra reads values ({said})"
