"""Tables and a picture of what `sam-rollout bench drafter` measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam_rollout.bench import sides
from sam_rollout.bench.drafts import CONTEXT_K
from sam_rollout.bench.replay import CONTEXT_BIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

# Sides in the picture, in Okabe and Ito's colours: any colour vision tells them apart.
_COLOURS = {
    sides.OWN: "#D55E00",
    sides.OWN_SIBLINGS: "#009E73",
    sides.DEFAULT: "#CC79A7",
    sides.OWN_RUN: "#F0E442",
    sides.FIRST: "#0072B2",
    sides.NGRAM_24: "#E69F00",
    sides.ARCTIC_4: "#56B4E9",
}
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
    ("catching up, ns a token", lambda row: f"{row['median_ns']:.0f} "
     f"({row['q1_ns']:.0f}..{row['q3_ns']:.0f})"),
    ("ns a token at 1k", lambda row: f"{row['short_ns']:.0f}"),
    ("at 256k", lambda row: f"{row['long_ns']:.0f}"),
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
    """Draw acceptance by side and set, and against context length, as a PNG."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"axes.grid": True, "grid.color": "#E4E4E4", "axes.axisbelow": True, "font.size": 9,
             "axes.spines.right": False, "axes.spines.top": False,
             "legend.frameon": False}  # fmt: skip
    names = [row["name"] for row in result["sets"]]
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        _plot_sets(left, result["acceptance"], names)
        _plot_context(right, result["context"])
        for axes in (left, right):
            axes.set_ylim(bottom=1, top=1 + 1.3 * (axes.get_ylim()[1] - 1))  # room for the legend
            axes.set_ylabel(f"mean acceptance length, k = {CONTEXT_K}")
            axes.legend(fontsize=7, ncols=2)
        figure.savefig(path, dpi=120)


def _plot_sets(axes: Axes, rows: list[dict[str, Any]], names: list[str]) -> None:
    lengths = {
        (row["side"], row["data"]): row["mean_acceptance_length"]
        for row in rows
        if row["k"] == CONTEXT_K
    }
    width = 0.8 / len(_COLOURS)
    for i, (side, colour) in enumerate(_COLOURS.items()):
        bars = [(j + i * width, lengths[side, name]) for j, name in enumerate(names)
                if (side, name) in lengths]  # fmt: skip
        if bars:
            places, heights = zip(*bars, strict=True)
            axes.bar(places, heights, width, color=colour, label=side, align="edge")
    axes.set_xticks([j + 0.4 for j in range(len(names))], names)
    axes.grid(visible=False, axis="x")


def _plot_context(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Own text on every set."""
    for (data,), cells in pivot(rows, ["data"], ["side", "from"])[0].items():
        points = [
            (row["from"] + CONTEXT_BIN / 2, row["mean_acceptance_length"])
            for (side, _), row in cells.items()
            if side == sides.OWN and row["steps"] >= _MIN_STEPS
        ]
        if points:
            axes.plot(*zip(*points, strict=True), "o-", markersize=3, label=f"{sides.OWN}, {data}")
    axes.set_xlabel("context, tokens")
