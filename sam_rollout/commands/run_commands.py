"""The commands `install` and `train`."""

import os
import sys

import typer

from sam_rollout.commands.command_line import one_line_errors

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def install(context: typer.Context) -> None:
    """Install the pinned packages of a device, cpu, cuda or ascend, into this environment."""
    from sam_rollout.installer import PROGRAM

    # The installer may replace packages that this process uses.
    os.execv(sys.executable, [sys.executable, str(PROGRAM), *context.args])


def train(context: typer.Context) -> None:
    """Train: experiment=tiny_cpu sam=on run_dir=... and other Hydra overrides.

    --dry-run prints the plan of a run, and --cfg job all its settings; neither starts anything.
    """
    from sam_rollout.core.composition import ExperimentError, recipe

    with one_line_errors(ExperimentError):
        entry = recipe()
    sys.argv = ["sam-rollout train", *context.args]
    entry.load()()
