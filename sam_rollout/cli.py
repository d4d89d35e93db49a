"""The command `sam-rollout`, which starts runs, and inspects runs and this machine."""

import typer

from sam_rollout import __version__
from sam_rollout.commands import (
    bench_commands,
    head_commands,
    machine_commands,
    report_commands,
    run_commands,
)

__all__ = ["app"]

app = typer.Typer(
    help="Start, compare and inspect RL runs whose rollouts draft with suffix automata.",
    no_args_is_help=True,
    add_completion=False,
)
app.command(context_settings={**run_commands.PASSED_ON, "help_option_names": []})(
    run_commands.install
)
app.command(context_settings=run_commands.PASSED_ON)(run_commands.train)
app.command(cls=report_commands.CompareCommand)(report_commands.compare)
app.command()(report_commands.dashboard)
app.command()(report_commands.simulate)
app.command()(report_commands.reference)
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
