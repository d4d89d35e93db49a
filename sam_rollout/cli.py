"""The command `sam-rollout`: everything about runs that needs no accelerator.

Heavy imports stay inside the commands, so that `sam-rollout version` answers at once.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sam_rollout import __version__

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    help="Compare and inspect RL runs whose rollouts draft with suffix automata.",
    no_args_is_help=True,
    add_completion=False,
)

RunArgument = Annotated[Path, typer.Argument(help="Run folder, holding sam/run.json.")]
PictureOption = Annotated[Path | None, typer.Option(help="Write a picture (PNG) there.")]


@contextmanager
def _one_line_errors() -> Iterator[None]:
    """Turns a missing or unreadable file into one line and exit code 2."""
    from sam_rollout.telemetry.records import RunFolderError

    try:
        yield
    except (RunFolderError, OSError) as error:
        typer.echo(f"sam-rollout: {error}", err=True)
        raise typer.Exit(2) from error


def _console() -> "Console":
    """A console wide enough for the tables when the output goes to a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


@app.command()
def compare(
    base: RunArgument,
    sam: Annotated[Path, typer.Option("--with", help="Run folder of the run with drafts.")],
    picture: PictureOption = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the figures there.")
    ] = None,
    skip_first: Annotated[
        int, typer.Option(min=0, help="Leave out this many steps at the start (warm-up).")
    ] = 0,
) -> None:
    """Compare a run without drafts (BASE) with one with drafts."""
    from sam_rollout.report.compare import compare_folders
    from sam_rollout.report.tables import print_comparison

    with _one_line_errors():
        comparison = compare_folders(base, sam, skip_first)
        print_comparison(comparison, _console())
        if picture is not None:
            from sam_rollout.report.plots import plot_comparison

            plot_comparison(comparison, picture)
        if json_path is not None:
            text = json.dumps(comparison.to_dict(), indent=2, allow_nan=False)
            json_path.write_text(text + "\n", encoding="utf-8")


@app.command()
def learning(run: RunArgument, picture: PictureOption = None) -> None:
    """Compare the accuracy of a run's first and last steps."""
    from sam_rollout.report import learning as report
    from sam_rollout.report.tables import print_learning

    with _one_line_errors():
        summary = report.learning(run)
        print_learning(summary, _console())
        if picture is not None:
            from sam_rollout.report.plots import plot_learning

            plot_learning(summary, picture)


@app.command()
def metrics_docs(
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 if the page is out of date.")
    ] = False,
    path: Annotated[Path, typer.Option(help="The page.")] = Path("docs/metrics.md"),
) -> None:
    """Render the page of metrics from their declarations."""
    from sam_rollout.telemetry.docs import render

    with _one_line_errors():
        if not check:
            path.write_text(render(), encoding="utf-8")
        elif path.read_text(encoding="utf-8") != render():
            typer.echo(
                f"sam-rollout: {path} is out of date: run sam-rollout metrics-docs", err=True
            )
            raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


if __name__ == "__main__":
    app()
