"""Draws what sums up a comparison as one picture, about 1200 pixels wide."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from sam_rollout.report.charts import COLOURS, STYLE, Side, draw
from sam_rollout.report.compare import Comparison
from sam_rollout.report.number_format import interval, number
from sam_rollout.report.panels import SUMMARY, Panel
from sam_rollout.report.runs import Run, flat
from sam_rollout.telemetry.curve import RunningCurve, running_curve

BASE, SAM = COLOURS[:2]
DPI = 120
_STYLE = STYLE | {"font.size": 9, "axes.titlesize": 9, "axes.labelsize": 8, "legend.fontsize": 9}


def sides(comparison: Comparison, names: Sequence[str] = ("BASE", "SAM")) -> list[Side]:
    """Both sides as charts draw them, over the compared steps.

    Running requests are those of the step whose rollout is BASE's middle one by time, in the middle
    run of each side.
    """
    step = _middle_step(comparison)
    return [
        Side(name, colour, [run.steps for run in runs], comparison.steps, _curve(runs, step))
        for name, colour, runs in zip(
            names, (BASE, SAM), (comparison.base, comparison.sam), strict=True
        )
    ]


def _middle_step(comparison: Comparison) -> int:
    frame = comparison.series.get("rollout")
    if frame is None:
        return comparison.steps[len(comparison.steps) // 2]
    known = frame["base"].dropna().sort_values()
    return int(known.index[len(known) // 2])


def _curve(runs: Sequence[Run], step: int) -> RunningCurve | None:
    curves = []
    for run in runs:
        table = run.read_table("engine_steps", run.problems)
        threshold = flat(run.start.config or {}).get("rollout_telemetry.tail_threshold", 0)
        rows = table.filter(pc.equal(table["step"], step))
        curves.append(running_curve([rows], tail_threshold=threshold))
    known = sorted(filter(None, curves), key=lambda curve: float(curve.time_s[-1]))
    return known[len(known) // 2] if known else None


def heading(comparison: Comparison, panel: Panel) -> tuple[str, list[str]]:
    """What a panel with a row shows, and the figures below it."""
    time, quantity = comparison.time(panel.row), comparison.quantity(panel.row)
    gain = time and (time.equal_tokens if panel.row == "tail" else time.raw)
    if time and gain:
        faster, saved = gain.speed_up_minus_one, gain.time_saved
        ratio = f"{1 + faster.value:.2f}x"
        seen = f"{ratio} as fast" if faster.clear else f"no clear gain ({ratio})"
        per = " per token" if panel.row == "tail" else ""
        details = [
            f"speed-up - 1{per} = {faster.value:.1%}{interval(faster, 100, '.1f')}",
            f"time saved{per} = {saved.value:.1%}{interval(saved, 100, '.1f')}",
        ]
        return f"{_capital(time.title)}: {seen}", details
    if quantity:
        found = quantity.difference
        seen = "SAM higher" if found.value > 0 else "SAM lower"
        if found.value == found.low == found.high == 0:
            seen = "identical"
        elif not found.clear:
            seen = "no clear difference"
        details = [
            f"medians {number(quantity.base.median)} and {number(quantity.sam.median)}",
            f"mean of SAM - BASE {found.value:+.3g}{interval(found, 1, '.3g')}",
        ]
        return f"{_capital(quantity.title.partition(',')[0])}: {seen}", details
    return panel.title, ["no figure that both sides recorded"]


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Writes the panels that sum up a comparison as a PNG; one says if a run lacks its metric.

    Lines are means over the runs of a side, thin ones its runs.
    """
    both = sides(comparison, comparison.labels)
    with matplotlib.rc_context(_STYLE):
        spaced = ConstrainedLayoutEngine(wspace=0.05, hspace=0.06)
        figure = Figure(figsize=(10, 6.4), layout=spaced)
        for axis, panel in zip(figure.subplots(2, 3).ravel(), SUMMARY, strict=True):
            _title(axis, *heading(comparison, panel))
            draw(axis, panel.of_both_sides(), both)
            axis.set_ylabel(", ".join(filter(None, (panel.title, panel.unit))))
            if panel.stacked:
                axis.set_xlabel(panel.reading)
        handles = [Line2D([], [], color=side.colour, linewidth=3) for side in both]
        figure.legend(handles, comparison.labels, loc="outside upper left", ncols=2)
        if comparison.fair is False:
            figure.text(
                0.99, 0.985, "unfair comparison: see what sam-rollout compare says",
                ha="right", va="top", color="#B00020",
            )  # fmt: skip
        figure.savefig(path, dpi=DPI, format="png")


def _title(axis: Axes, headline: str, details: Sequence[str]) -> None:
    """A bold line that says what one sees, and lines of figures below it."""
    axis.set_title(headline, pad=7 + 11 * len(details))
    text = axis.annotate(
        "\n".join(details), (0, 1), xytext=(0, 4), xycoords="axes fraction",
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    text.set_in_layout(False)  # the pad of the title makes its room; its width must not cost any
