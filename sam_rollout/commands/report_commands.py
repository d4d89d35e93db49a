"""The commands `compare`, `dashboard` and `simulate`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sam_rollout.commands import command_line as shared


class CompareCommand(TyperCommand):
    """A command whose option --with takes all folders up to the next option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat --with before each further folder that follows a --with."""
        spread, behind = list[str](), False
        for word in args:
            behind = word == "--with" or (behind and not word.startswith("-"))
            if word != "--with":
                spread += ["--with", word] if behind else [word]
        return super().parse_args(ctx, spread)


def compare(
    base: Annotated[
        list[Path] | None, typer.Argument(help="Run folders of runs without drafts.")
    ] = None,
    sam: Annotated[
        list[Path] | None, typer.Option("--with", help="Runs with drafts; several may follow.")
    ] = None,
    picture: shared.PictureOption = None,
    json_path: shared.FiguresOption = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write a page for the browser to this file.")
    ] = None,
    skip_first: Annotated[
        int, typer.Option(min=0, help="Leave out this many steps at the start (warm-up).")
    ] = 0,
) -> None:
    """Compare runs without drafts (BASE) with runs with drafts (SAM)."""
    if not base or not sam:
        raise typer.BadParameter("name runs on both sides: BASE... --with SAM...")
    from sam_rollout.report.compare import compare_folders
    from sam_rollout.report.comparison_tables import print_comparison

    with shared.one_line_errors():
        comparison = compare_folders(base, sam, skip_first)
        if picture is not None:
            from sam_rollout.report.pictures import plot_comparison

            plot_comparison(comparison, picture)
        shared.write_json(json_path, comparison.to_dict(), indent=2)
        if html is not None:
            from sam_rollout.report.page import write_page

            write_page(comparison, html)
        # Printing comes last, because it fails if the reader has closed the pipe.
        print_comparison(comparison, shared.wide_console())


def dashboard(
    runs: Annotated[list[Path] | None, typer.Argument(help="Run folders, for --picture.")] = None,
    entity: Annotated[str, typer.Option(help="wandb's user or team.")] = "",
    project: Annotated[str, typer.Option(help="wandb's project.")] = "sam_rollout",
    group: Annotated[
        str, typer.Option(help="Show only this comparison's runs (compare.group), by side.")
    ] = "",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the workspace to this file only.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw the sections of RUNS as pictures into this folder.")
    ] = None,
) -> None:
    """Build a wandb workspace of a run's metrics: comparison, long tail, drafts, learning."""
    from sam_rollout.report import wandb_workspace as workspace

    if runs or picture:
        if not runs or not picture:
            raise typer.BadParameter("name run folders together with --picture")
        from sam_rollout.report.pictures import draw_sections

        with shared.one_line_errors():
            typer.echo("\n".join(map(str, draw_sections(runs, picture))))
        return
    with shared.one_line_errors(workspace.DashboardError):
        built = workspace.build(entity, project, group)
        shared.write_json(json_path, workspace.specification(built))
        if json_path is None:
            if not entity:
                raise typer.BadParameter("name the project's user or team", param_hint="--entity")
            typer.echo(workspace.save(built))


def simulate(
    run: Annotated[Path, typer.Argument(help="Run folder, holding sam/run.json.")],
    steps: Annotated[
        int | None, typer.Option(min=1, help="Number of training steps; all by default.")
    ] = None,
    json_path: shared.FiguresOption = None,
) -> None:
    """Estimate the gain of sam=on for a run without drafts, from its records and texts."""
    from sam_rollout.bench.forecast import forecast

    with shared.one_line_errors(ValueError):
        shared.write_json(json_path, forecast(run, steps, shared.wide_console()))
