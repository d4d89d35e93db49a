"""Entry point: ``python -m recipes.dapo_qwen3.main [experiment=...] [sam=on|off] [key=value ...]``.

Composes the configuration, checks what is ours before anything heavy is imported, and hands over to
verl's trainer. With ``--dry-run`` it prints what would run, and whether it can, and starts nothing:
neither data nor weights nor a device have to be there. With ``--check-only`` it ends after its own
checks, with a line that says where checkpoints would lie; scripts/node.sh asks for that before it
starts a cluster.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError

REPOSITORY = Path(__file__).resolve().parents[2]
DRY_RUN, CHECK_ONLY = "--dry-run", "--check-only"
CHECKPOINTS = "checkpoints: "  # scripts/lib/cluster.py looks for it
# Hydra would make a run folder and a log file.
LEAVE_NO_TRACE = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")


def _locate_verl_config() -> None:
    """Tell Hydra where verl's configuration lies, without importing verl.

    verl settles on a device while it is imported, and which one is part of the configuration.
    """
    spec = importlib.util.find_spec("verl")
    if spec is None:
        sys.exit("verl is not installed in this environment: run scripts/install.sh first")
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    os.environ["VERL_CONFIG_DIR"] = str(folder)


_locate_verl_config()
# Paths inside the checkout, whatever the working directory.
OmegaConf.register_new_resolver("repo", lambda path: str(REPOSITORY / path), replace=True)


def _check_data(config: DictConfig) -> None:
    """Name a data file that is not there; verl would only after a minute.

    Raises:
        ConfigError: Says how the recipe's own files are made.
    """
    for name in ("train_files", "val_files"):
        given = config.data[name] or []
        for file in [given] if isinstance(given, str) else given:
            if "://" not in file and not Path(file).expanduser().exists():
                raise ConfigError(
                    f"data.{name}",
                    file,
                    "there is no such file; python -m recipes.dapo_qwen3.prepare_data --help tells "
                    "how the recipe's data sets are made",
                )


def _check(config: DictConfig) -> None:
    """End with one line if a setting or a data file cannot be right."""
    from sam_rollout.integrations.verl.launch import check

    try:
        check(config)
        _check_data(config)
    except ConfigError as error:
        sys.exit(f"Configuration error: {error}")


@hydra.main(config_path="../../configs", config_name="dapo_qwen3", version_base="1.3")
def main(config: DictConfig) -> None:
    """Run the composed experiment."""
    from sam_rollout.integrations.verl.launch import VerlRefusal, export_environment, launch

    _check(config)
    export_environment(config)
    try:
        launch(config)
    except VerlRefusal as error:
        sys.exit(f"Configuration error: verl refuses it: {error}")


@hydra.main(config_path="../../configs", config_name="dapo_qwen3", version_base="1.3")
def dry_run(config: DictConfig) -> None:
    """Print the plan of the composed experiment."""
    from recipes.dapo_qwen3.dry_run import show_plan
    from sam_rollout.integrations.verl.launch import VerlRefusal

    try:
        show_plan(config)
    except ConfigError as error:
        sys.exit(f"Configuration error: {error}")
    except VerlRefusal as error:
        sys.exit(f"Configuration error: verl refuses it: {error}")


@hydra.main(config_path="../../configs", config_name="dapo_qwen3", version_base="1.3")
def check_only(config: DictConfig) -> None:
    """Check the composed experiment; the last line names the folder of its checkpoints."""
    _check(config)
    print(f"{CHECKPOINTS}{Path(config.trainer.default_local_dir).absolute()}")


if __name__ == "__main__":
    for flag, function in ((DRY_RUN, dry_run), (CHECK_ONLY, check_only)):
        if flag in sys.argv:
            given = [part for part in sys.argv[1:] if part != flag]
            # Beside the first override: Hydra takes none behind its own flags once there were some.
            place = next((i for i, part in enumerate(given) if "=" in part), len(given))
            sys.argv[1:] = [*given[:place], *LEAVE_NO_TRACE, *given[place:]]
            function()
            break
    else:
        main()
