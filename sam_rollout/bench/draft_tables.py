"""Prints the results of `sam-rollout bench drafter` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from sam_rollout.report.comparison_tables import Table, print_table

SHOWN = (("mean_acceptance_length", 3), ("drafted_per_step", 2))  # figures, and their digits


def show(result: dict[str, Any], console: Console) -> None:
    """Print all results."""
    console.print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    for side, why in result["missing"].items():
        console.print(f"missing: {side} ({why})", highlight=False)
    heads = ("groups", "siblings", "responses", "tokens", "read before")
    rows = [
        (row["name"], *(f"{row[head.replace(' ', '_')]:,}" for head in heads))
        for row in result["sets"]
    ]
    print_table(Table("Sets of texts", ("", *heads), rows), console)
    for data in dict.fromkeys(row["data"] for row in result["acceptance"]):
        print_table(_acceptance(data, result["acceptance"]), console)
    print_table(_calls(result["calls"]), console)


def pivot(
    rows: Iterable[dict[str, Any]], down: Sequence[str], across: Sequence[str]
) -> tuple[dict[tuple, dict[tuple, dict[str, Any]]], list[tuple]]:
    """Arrange rows of a result as a table.

    Args:
        rows: The rows.
        down: Keys whose values name a line.
        across: Keys whose values name a column.

    Returns:
        Line -> column -> row, and all columns. Lines and columns are tuples of values, in order of
        appearance.
    """
    lines: dict[tuple, dict[tuple, dict[str, Any]]] = {}
    columns: dict[tuple, None] = {}
    for row in rows:
        line, column = (tuple(row[name] for name in names) for names in (down, across))
        lines.setdefault(line, {})[column] = row
        columns[column] = None
    return lines, list(columns)


def _acceptance(data: str, rows: list[dict[str, Any]]) -> Table:
    lines, ks = pivot([row for row in rows if row["data"] == data], ["side"], ["k"])
    head = [f"{what}, k = {k}" for (k,) in ks for what in ("MAL", "a step")]
    cells = [
        (side, *(f"{row[name]:.{digits}f}" for row in of_side.values() for name, digits in SHOWN))
        for (side,), of_side in lines.items()
    ]
    return Table(f"{data}: mean acceptance length, drafted tokens", ("", *head), cells)


def _calls(rows: list[dict[str, Any]]) -> Table:
    lines, sides = pivot(rows, ["context", "rows"], ["side"])
    cells = [
        (f"{batch} x {context}", *(_call(of_size.get(side)) for side in sides))
        for (context, batch), of_size in lines.items()
    ]
    title = "One call, us: median (quartiles; the first call after other sides used the caches)"
    return Table(title, ("rows x tokens", *(side for (side,) in sides)), cells)


def _call(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['median_us']:.0f} ({row['q1_us']:.0f}..{row['q3_us']:.0f}; {row['cold_us']:.0f})"
