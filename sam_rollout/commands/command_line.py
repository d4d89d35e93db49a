"""What the commands share: options, and how they print and fail."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from sam_rollout.core.json_values import dumps

if TYPE_CHECKING:
    from rich.console import Console

RunArgument = Annotated[Path, typer.Argument(help="Run folder, holding sam/run.json.")]
PictureOption = Annotated[Path | None, typer.Option(help="Write a picture (PNG) there.")]
FiguresOption = Annotated[Path | None, typer.Option("--json", help="Write the figures there.")]
PrintJsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def one_line_errors(*others: type[Exception]) -> Iterator[None]:
    """Turn a missing or unreadable file, or an error of `others`, into a line and exit code 2."""
    from sam_rollout.telemetry.records import RunFolderError

    caught: tuple[type[Exception], ...] = (RunFolderError, OSError, *others)
    try:
        yield
    except caught as error:
        typer.echo(f"sam-rollout: {error}", err=True)
        raise typer.Exit(2) from error


def wide_console() -> "Console":
    """Return a console wide enough for the tables when the output goes to a file or a pipe."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)


def write_json(path: Path | None, content: object, indent: int = 1) -> None:
    """Write JSON if a file was asked for."""
    if path is not None:
        path.write_text(dumps(content, indent=indent) + "\n", "utf-8")


def _default(option: Field) -> Any:
    if option.default_factory is not MISSING:
        return option.default_factory()
    return inspect.Parameter.empty if option.default is MISSING else option.default


def with_options(options: type[Any]) -> Callable[[Callable[[Any], None]], Callable[..., None]]:
    """Make a command of a function of one object, a dataclass whose fields are the options."""

    def decorate(act: Callable[[Any], None]) -> Callable[..., None]:
        def command(**given: Any) -> None:
            act(options(**given))

        hints = get_type_hints(options, include_extras=True)
        parameters = [
            inspect.Parameter(
                one.name, inspect.Parameter.KEYWORD_ONLY, default=_default(one),
                annotation=hints[one.name],
            )
            for one in fields(options)
        ]  # fmt: skip
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__name__, command.__doc__ = act.__name__, act.__doc__
        command.__annotations__ = hints
        return command

    return decorate
