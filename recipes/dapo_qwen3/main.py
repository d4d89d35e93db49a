"""Entry point: ``sam-rollout train [experiment=...] [sam=on|off] [key=value ...]``.

``python -m recipes.dapo_qwen3.main`` is the same program. It composes the configuration, checks the
configuration before anything heavy is imported, and starts verl's trainer. ``--dry-run`` prints the
plan of a run and starts nothing; it needs no data, no weights and no device. With ``--check-only``
the program ends after the checks; scripts/node.sh runs these checks before it starts a cluster.
"""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from sam_rollout.config import ConfigError
from sam_rollout.core.composition import ExperimentError, explain, prepare

FOLDER = Path(__file__).resolve().parent
DRY_RUN, CHECK_ONLY = "--dry-run", "--check-only"
# Without these overrides, Hydra would make a run folder and a log file.
LEAVE_NO_TRACE = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=stdout")
# With this environment variable, Hydra raises its errors. Without it, Hydra prints a page of text
# and ends the process.
FULL_ERROR = "HYDRA_FULL_ERROR"
Application = Callable[[DictConfig], None]
hydra_main = hydra.main(
    config_path=str(FOLDER / "configs"), config_name="dapo_qwen3", version_base="1.3"
)

try:
    prepare(FOLDER)
except ExperimentError as error:
    sys.exit(f"{error}: {error.fix}")


def _application(act: Application) -> Callable[[], None]:
    """Return a program that composes the configuration from arguments, and passes it to `act`.

    If Hydra or a check refuses a setting, a file or the data, the program ends with one line.
    """

    @functools.wraps(act)
    def program() -> None:
        asked = FULL_ERROR in os.environ

        @functools.wraps(act)
        def composed(config: DictConfig) -> None:
            if not asked:
                os.environ.pop(FULL_ERROR, None)
            try:
                act(config)
            except ConfigError as error:
                sys.exit(f"Configuration error: {error}")
            except OmegaConfBaseException as error:
                sys.exit(f"Configuration error: {explain(error)}")

        if asked:
            return hydra_main(composed)()
        os.environ[FULL_ERROR] = "1"
        try:
            return hydra_main(composed)()
        except (HydraException, OmegaConfBaseException) as error:
            sys.exit(f"Configuration error: {explain(error)}")
        finally:
            os.environ.pop(FULL_ERROR, None)

    return program


def make_data(config: DictConfig) -> None:
    """Make the recipe's own problems if the run needs them and their files are missing."""
    file = Path(str(config.data.train_files))
    if file.exists() or file.parent.parent != Path("data").absolute():
        return
    from recipes.dapo_qwen3.prepare_data import MADE, prepare

    if file.parent.name in MADE:
        prepare(file.parent.name, file.parent)


@_application
def main(config: DictConfig) -> None:
    """Run the composed experiment."""
    from sam_rollout.integrations.verl.checks import check, settled
    from sam_rollout.integrations.verl.environment import export_environment
    from sam_rollout.integrations.verl.launch import launch, prepare_run

    settled(config)  # a wrong setting ends the run before any file is made
    make_data(config)
    run = check(config)
    export_environment(config, run)
    prepare_run(config, run)
    launch(config, run)


@_application
def dry_run(config: DictConfig) -> None:
    """Print the plan of the composed experiment."""
    from recipes.dapo_qwen3.dry_run import show_plan

    show_plan(config)


@_application
def check_only(config: DictConfig) -> None:
    """Check the composed experiment."""
    from sam_rollout.integrations.verl.checks import ALL_CHECKS, check

    check(config, ALL_CHECKS)


def run_command() -> None:
    """Run, plan or check the experiment, as the arguments say."""
    for flag, function in ((DRY_RUN, dry_run), (CHECK_ONLY, check_only)):
        if flag in sys.argv:
            given = [part for part in sys.argv[1:] if part != flag]
            # Hydra accepts overrides only in one block, so ours precede the first given override.
            place = next((i for i, part in enumerate(given) if "=" in part), len(given))
            sys.argv[1:] = [*given[:place], *LEAVE_NO_TRACE, *given[place:]]
            return function()
    return main()


if __name__ == "__main__":
    run_command()
