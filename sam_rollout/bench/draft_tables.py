"""Tables and a picture of what `sam-rollout bench drafter` measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam_rollout.bench import sides
from sam_rollout.bench.drafts import CONTEXT_K
from sam_rollout.bench.replay import CONTEXT_BIN

if TYPE_CHECKING:
    from rich.console import Console

_MIN_STEPS = 200  # of a point in the picture


def show(result: dict[str, Any], console: Console) -> None:
    """Print everything."""
    console.print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    for side, why in result["missing"].items():
        console.print(f"not there: {side} ({why})", highlight=False)
    _show_sets(result["sets"], console)
    _show_acceptance(result["acceptance"], console)
    _show_calls(result["calls"], console)
    _show_costs(result["costs"], console)


def _table(title: str, *heads: str) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 else "right")
    return table


def pivot(
    rows: Iterable[dict[str, Any]], down: Sequence[str], across: Sequence[str]
) -> tuple[dict[tuple, dict[tuple, dict[str, Any]]], list[tuple]]:
    """Rows of a result by what stands before a line and above a column, and all columns.

    Lines and columns are named by tuples of values and come in order of appearance.
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
    heads = [f"{what}, k = {k}" for k in ks for what in ("MAL", "a step", "an accepted")]
    for data in dict.fromkeys(row["data"] for row in rows):
        table = _table(f"{data}: mean acceptance length, drafted tokens", "", *heads)
        lines, _ = pivot([row for row in rows if row["data"] == data], ["side"], ["k"])
        for (side,), cells in lines.items():
            table.add_row(side, *(cell for row in cells.values() for cell in _acceptance(row)))
        console.print(table)


def _acceptance(row: dict[str, Any]) -> tuple[str, str, str]:
    wasted = row["drafted_per_accepted"]
    return (
        f"{row['mean_acceptance_length']:.3f}",
        f"{row['drafted_per_step']:.2f}",
        "-" if wasted is None else f"{wasted:.2f}",
    )


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


_COSTS = (
    ("bytes a token", lambda row: f"{row['bytes_per_token']:.1f}"),
    ("slowest call of a batch, CPU ms", lambda row: f"{row['slowest_ms']:.2f}"),
    ("end of all requests and their step, CPU ms", lambda row: f"{row['end_ms']:.2f}"),
    ("bytes left when all ended", lambda row: f"{row['left_bytes'] - row['start_bytes']}"),
)  # fmt: skip


def _show_costs(rows: list[dict[str, Any]], console: Console) -> None:
    table = _table("costs", "", *(row["side"] for row in rows))
    for name, cell in _COSTS:
        table.add_row(name, *(cell(row) for row in rows))
    console.print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw acceptance with own text against the length of the context, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.8), layout="constrained")
    axes = figure.subplots()
    for (data,), cells in pivot(result["context"], ["data"], ["side", "from"])[0].items():
        points = [
            (row["from"] + CONTEXT_BIN / 2, row["mean_acceptance_length"])
            for (side, _), row in cells.items()
            if side == sides.OWN and row["steps"] >= _MIN_STEPS
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=data)
    axes.set_ylim(bottom=1)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(f"mean acceptance length, {sides.OWN}, k = {CONTEXT_K}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(path, dpi=120)
