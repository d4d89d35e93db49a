"""The command `sam-rollout`, which starts runs, and inspects runs and this machine."""

import os
import sys

import typer

from sam_rollout import __version__
from sam_rollout.commands import bench_commands, head_commands, machine_commands, report_commands
from sam_rollout.commands.command_line import one_line_errors

__all__ = ["app"]

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(
    help="Start, compare and inspect RL runs whose rollouts draft with suffix automata.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command(context_settings={**PASSED_ON, "help_option_names": []})
def install(context: typer.Context) -> None:
    """Install the pinned packages of a device, cpu, cuda or ascend, into this environment."""
    from sam_rollout.installer import PROGRAM

    # The installer may replace packages that this process uses.
    os.execv(sys.executable, [sys.executable, str(PROGRAM), *context.args])


@app.command(context_settings=PASSED_ON)
def train(context: typer.Context) -> None:
    """Train with Hydra overrides, such as experiment=tiny_cpu sam=on run_dir=...

    --dry-run prints the plan of a run. --cfg job prints all its settings. Neither starts anything.
    """
    from sam_rollout.core.composition import ExperimentError, recipe

    with one_line_errors(ExperimentError):
        entry = recipe()
    sys.argv = ["sam-rollout train", *context.args]
    entry.load()()


app.command(cls=report_commands.CompareCommand)(report_commands.compare)
app.command()(report_commands.dashboard)
app.command()(report_commands.simulate)
app.command()(machine_commands.check_operators)
app.command()(machine_commands.doctor)
app.add_typer(bench_commands.app, name="bench")
app.add_typer(head_commands.app, name="head")


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


if __name__ == "__main__":
    app()
