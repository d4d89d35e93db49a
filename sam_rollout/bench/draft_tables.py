"""Tables and a picture of what `sam-rollout bench drafter` measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam_rollout.bench import sides
from sam_rollout.bench.drafts import CONTEXT_K, COT, TRACES
from sam_rollout.bench.generator import PUBLISHED
from sam_rollout.bench.replay import CONTEXT_BIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.console import Console

# Okabe and Ito's colours are told apart by readers with any colour vision.
_COLOURS = {
    sides.OWN: "#D55E00",
    sides.ADAPTIVE: "#CC79A7",
    sides.OWN_SIBLINGS: "#009E73",
    sides.FIRST: "#0072B2",
    sides.NGRAM_24: "#E69F00",
    sides.ARCTIC: "#56B4E9",
}
_MIN_STEPS = 200  # of a point in the picture


def show(result: dict[str, Any], console: Console) -> None:
    """Print everything."""
    console.print(", ".join(f"{name} {value}" for name, value in result["machine"].items()))
    for side, why in result["missing"].items():
        console.print(f"not there: {side} ({why})", highlight=False)
    _show_acceptance(result["acceptance"], console)
    _show_sweep(result["sweep"], console)
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


def _show_sweep(rows: list[dict[str, Any]], console: Console) -> None:
    lines, ks = pivot(rows, ["side"], ["k"])
    table = _table(f"{COT}: mean acceptance length against k", "", *(str(k) for (k,) in ks))
    for (side,), cells in lines.items():
        table.add_row(side, *(f"{row['mean_acceptance_length']:.2f}" for row in cells.values()))
    console.print(table)


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
    ("of one long text, CPU ms", lambda row: f"{row['slowest_long_ms']:.2f}"),
    ("end of all requests and their step, CPU ms", lambda row: f"{row['end_ms']:.2f}"),
    ("bytes left when all ended", lambda row: f"{row['left_bytes'] - row['start_bytes']}"),
)  # fmt: skip


def _show_costs(rows: list[dict[str, Any]], console: Console) -> None:
    table = _table("costs", "", *(row["side"] for row in rows))
    for name, cell in _COSTS:
        table.add_row(name, *(cell(row) for row in rows))
    console.print(table)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw acceptance against context length and against k as a PNG.

    The left panel has the form of the figure in the article "SAM投机推理", section 1.3, and shows
    its values.
    """
    import matplotlib
    from matplotlib.figure import Figure

    style = {"axes.grid": True, "grid.color": "#E4E4E4", "font.size": 9, "legend.frameon": False,
             "axes.spines.right": False, "axes.spines.top": False}  # fmt: skip
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(10, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        _plot_context(left, result["context"])
        _plot_sweep(right, result["sweep"])
        for axes in (left, right):
            axes.set_ylim(bottom=1)
            axes.legend(fontsize=8)
        figure.savefig(path, dpi=120)


def _plot_context(axes: Axes, rows: list[dict[str, Any]]) -> None:
    shown = {(COT, sides.OWN): "-", (COT, sides.FIRST): "-", (COT, sides.ARCTIC): "-",
             (TRACES, sides.OWN): "o--", (TRACES, sides.OWN_SIBLINGS): "o--"}  # fmt: skip
    for (data, side), line in shown.items():
        points = [
            (row["from"] + CONTEXT_BIN / 2, row["mean_acceptance_length"])
            for row in rows
            if (row["data"], row["side"]) == (data, side) and row["steps"] >= _MIN_STEPS
        ]
        _plot_side(axes, points, line, side, data)
    for start, stop, published in PUBLISHED:
        label = "published (Qwen3-8B, MATH-500)" if start == 0 else None
        axes.plot([start, stop], [published] * 2, color="#444444", linewidth=3, label=label)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(f"mean acceptance length, k = {CONTEXT_K}")


def _plot_sweep(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for (side,), cells in pivot(rows, ["side"], ["k"])[0].items():
        points = [(k, row["mean_acceptance_length"]) for (k,), row in cells.items()]
        _plot_side(axes, points, "o-", side, COT)
    axes.set_xlabel("draft tokens a step, k")
    axes.set_ylabel("mean acceptance length")


def _plot_side(
    axes: Axes, points: list[tuple[float, float]], line: str, side: str, data: str
) -> None:
    if points:
        label, colour = f"{side}, {data}", _COLOURS[side]
        axes.plot(*zip(*points, strict=True), line, markersize=3, color=colour, label=label)
