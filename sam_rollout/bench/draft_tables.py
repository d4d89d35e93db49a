"""Tables and a picture of what `sam-rollout bench drafter` measured."""

from __future__ import annotations

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


def _show_acceptance(rows: list[dict[str, Any]], console: Console) -> None:
    ks = sorted({row["k"] for row in rows})
    heads = [f"{what}, k = {k}" for k in ks for what in ("MAL", "a step", "an accepted")]
    for data in dict.fromkeys(row["data"] for row in rows):
        table = _table(f"{data}: mean acceptance length, drafted tokens", "", *heads)
        of_data = [row for row in rows if row["data"] == data]
        for side in dict.fromkeys(row["side"] for row in of_data):
            cells = [row for row in of_data if row["side"] == side]
            table.add_row(side, *(cell for row in cells for cell in _acceptance_cells(row)))
        console.print(table)


def _acceptance_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    wasted = row["drafted_per_accepted"]
    return (
        f"{row['mean_acceptance_length']:.3f}",
        f"{row['drafted_per_step']:.2f}",
        "-" if wasted is None else f"{wasted:.2f}",
    )


def _show_sweep(rows: list[dict[str, Any]], console: Console) -> None:
    ks = list(dict.fromkeys(row["k"] for row in rows))
    table = _table(f"{COT}: mean acceptance length against k", "", *map(str, ks))
    for side in dict.fromkeys(row["side"] for row in rows):
        lengths = [row["mean_acceptance_length"] for row in rows if row["side"] == side]
        table.add_row(side, *(f"{length:.2f}" for length in lengths))
    console.print(table)


def _show_calls(rows: list[dict[str, Any]], console: Console) -> None:
    sizes = list(dict.fromkeys((row["context"], row["rows"]) for row in rows))
    names = list(dict.fromkeys(row["side"] for row in rows))
    title = "one call, us: median (quartiles; the first one after others have used the caches)"
    table = _table(title, "rows x tokens", *names)
    for context, batch in sizes:
        of_size = {
            row["side"]: row for row in rows if (row["context"], row["rows"]) == (context, batch)
        }
        cells = [_call_cell(of_size[name]) if name in of_size else "-" for name in names]
        table.add_row(f"{batch} x {context}", *cells)
    console.print(table)


def _call_cell(row: dict[str, Any]) -> str:
    quartiles = f"{row['q1_us']:.0f}..{row['q3_us']:.0f}"
    return f"{row['median_us']:.0f} ({quartiles}; {row['cold_us']:.0f})"


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
        figure.savefig(path, dpi=120)


def _plot_context(axes: Axes, rows: list[dict[str, Any]]) -> None:
    shown = {(COT, sides.OWN): "-", (COT, sides.FIRST): "-", (COT, sides.ARCTIC): "-",
             (TRACES, sides.OWN): "o--", (TRACES, sides.OWN_SIBLINGS): "o--"}  # fmt: skip
    for (data, side), line in shown.items():
        points = [
            row
            for row in rows
            if (row["data"], row["side"]) == (data, side) and row["steps"] >= _MIN_STEPS
        ]
        if points:
            axes.plot(
                [row["from"] + CONTEXT_BIN / 2 for row in points],
                [row["mean_acceptance_length"] for row in points],
                line,
                markersize=3,
                color=_COLOURS[side],
                label=f"{side}, {data}",
            )
    for start, stop, published in PUBLISHED:
        label = "published (Qwen3-8B, MATH-500)" if start == 0 else None
        axes.plot([start, stop], [published] * 2, color="#444444", linewidth=3, label=label)
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(f"mean acceptance length, k = {CONTEXT_K}")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=8)


def _plot_sweep(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for side in dict.fromkeys(row["side"] for row in rows):
        of_side = [row for row in rows if row["side"] == side]
        axes.plot(
            [row["k"] for row in of_side],
            [row["mean_acceptance_length"] for row in of_side],
            "o-",
            markersize=3,
            color=_COLOURS[side],
            label=f"{side}, {COT}",
        )
    axes.set_xlabel("draft tokens a step, k")
    axes.set_ylabel("mean acceptance length")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=8)
