"""Prints the results of `sam-rollout bench drafter` as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console


def show(result: dict[str, Any], console: Console) -> None:
    """Print all results."""
    console.print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    for side, why in result["missing"].items():
        console.print(f"missing: {side} ({why})", highlight=False)
    _show_sets(result["sets"], console)
    _show_acceptance(result["acceptance"], console)
    _show_calls(result["calls"], console)


def _table(title: str, *heads: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    return table


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


def _show_sets(rows: list[dict[str, Any]], console: Console) -> None:
    heads = ("groups", "siblings", "responses", "tokens", "read before")
    table = _table("sets of texts", "", *heads)
    for row in rows:
        table.add_row(row["name"], *(f"{row[head.replace(' ', '_')]:,}" for head in heads))
    console.print(table)


def _show_acceptance(rows: list[dict[str, Any]], console: Console) -> None:
    ks = sorted({row["k"] for row in rows})
    heads = [f"{what}, k = {k}" for k in ks for what in ("MAL", "a step")]
    for data in dict.fromkeys(row["data"] for row in rows):
        table = _table(f"{data}: mean acceptance length, drafted tokens", "", *heads)
        lines, _ = pivot([row for row in rows if row["data"] == data], ["side"], ["k"])
        for (side,), cells in lines.items():
            table.add_row(side, *(cell for row in cells.values() for cell in _acceptance(row)))
        console.print(table)


def _acceptance(row: dict[str, Any]) -> tuple[str, str]:
    return f"{row['mean_acceptance_length']:.3f}", f"{row['drafted_per_step']:.2f}"


def _show_calls(rows: list[dict[str, Any]], console: Console) -> None:
    lines, names = pivot(rows, ["context", "rows"], ["side"])
    title = "one call, us: median (quartiles; the first one after others have used the caches)"
    table = _table(title, "rows x tokens", *(side for (side,) in names))
    for (context, batch), cells in lines.items():
        table.add_row(f"{batch} x {context}", *(_call(cells.get(name)) for name in names))
    console.print(table)


def _call(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['median_us']:.0f} ({row['q1_us']:.0f}..{row['q3_us']:.0f}; {row['cold_us']:.0f})"
