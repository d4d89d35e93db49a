"""Options, output and errors that all commands share."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sam_rollout.core.json_values import dumps

if TYPE_CHECKING:
    from rich.console import Console

PictureOption = Annotated[Path | None, typer.Option(help="Write a picture (PNG) to this file.")]
FiguresOption = Annotated[Path | None, typer.Option("--json", help="Write results to this file.")]
PrintJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """Turn file errors, and errors of the types `others`, into one line and exit status 2."""
    from sam_rollout.telemetry.records import RunFolderError

    caught: tuple[type[Exception], ...] = (RunFolderError, OSError, *others)
    try:
        yield
    except caught as error:
        typer.echo(f"sam-rollout: {error}", err=True)
        raise typer.Exit(2) from error


def wide_console() -> "Console":
    """Return a console that is wide enough for tables, even if the output is a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def write_json(path: Path | None, content: object, indent: int = 1) -> None:
    """Write `content` as JSON to `path`, unless `path` is None."""
    if path is not None:
        path.write_text(dumps(content, indent=indent) + "\n", "utf-8")
