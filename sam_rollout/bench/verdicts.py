"""Targets that a measurement is held against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Verdict:
    """One target of --check.

    `reached` is None where it cannot be judged: what it needs is not installed, or the run was too
    small for what it says.
    """

    target: str
    measured: str
    reached: bool | None


_WORDS = {True: "ok", False: "MISSED", None: "not judged"}


def show_check(verdicts: list[Verdict], console: Console) -> None:
    """Print the targets and whether they are reached."""
    from rich.table import Table

    table = Table("target", "measured", "verdict")
    for verdict in verdicts:
        table.add_row(verdict.target, verdict.measured, _WORDS[verdict.reached])
    console.print(table)
