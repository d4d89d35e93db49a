"""Draws panels as PNG pictures: all sections of single runs, or the summary of a comparison."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sam_rollout.report.charts import COLOURS, STYLE, Side, draw, rollout_curve
from sam_rollout.report.compare import Comparison, interval, number
from sam_rollout.report.panels import SECTIONS, SUMMARY, Panel
from sam_rollout.report.runs import Run, load_run
from sam_rollout.telemetry.baseline import Baseline

BASE, SAM = COLOURS[:2]
COLUMNS = 3
DPI = 120
_STYLE = STYLE | {"font.size": 9, "axes.labelsize": 8, "legend.fontsize": 9}


def draw_sections(folders: Sequence[Path], output: Path) -> list[Path]:
    """Write one PNG per section; runs differ in colour, and metrics differ in line style."""
    runs = [load_run(path) for path in folders]
    names = [folder.absolute().name for folder in folders]
    if len(set(names)) < len(names):
        names = list(map(str, folders))
    sides = [
        Side(
            name, COLOURS[place % len(COLOURS)],
            [_with_baseline(run, runs[0]) if place else run.steps],
            curve=rollout_curve(run, run.training_steps[-1]),
        )
        for place, (name, run) in enumerate(zip(names, runs, strict=True))
    ]  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for section in SECTIONS:
        rows = -(-len(section.panels) // COLUMNS)
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(12, 0.7 + 2.6 * rows), dpi=100, layout="constrained")
            figure.suptitle(f"{section.title}: {section.question}", x=0.01, ha="left", fontsize=11)
            axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
            for axis, panel in zip(axes, section.panels, strict=False):
                axis.set_title(panel.title)
                draw(axis, panel, sides)
                if axis.get_legend_handles_labels()[0]:
                    axis.legend(loc="best")
            for axis in axes[len(section.panels) :]:
                axis.set_axis_off()
            written.append(output / f"{section.title.lower().replace(' ', '_')}.png")
            figure.savefig(written[-1])
    return written


def _with_baseline(run: Run, baseline: Run) -> pd.DataFrame:
    steps = run.steps
    if any(name.startswith("compare/") for name in steps.columns):
        return steps
    compared = Baseline(baseline.path)
    added = {step: compared.metrics(step, row.dropna().to_dict()) for step, row in steps.iterrows()}
    return steps.join(pd.DataFrame.from_dict(added, orient="index", dtype=float))


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Write a comparison's summary panels as a PNG; thick lines show the mean of a side's runs."""
    both = sides(comparison, comparison.labels)
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        for axis, panel in zip(figure.subplots(2, COLUMNS).ravel(), SUMMARY, strict=True):
            _title(axis, *heading(comparison, panel))
            draw(axis, panel.of_both_sides(), both)
            axis.set_ylabel(", ".join(filter(None, (panel.title, panel.unit))))
        handles = [Line2D([], [], color=side.colour, linewidth=3) for side in both]
        figure.legend(handles, comparison.labels, loc="outside upper left", ncols=2)
        if comparison.fair is False:
            figure.text(
                0.99, 0.985, "unfair comparison: sam-rollout compare prints the reasons",
                ha="right", va="top", color="#B00020",
            )  # fmt: skip
        figure.savefig(path, dpi=DPI, format="png")


def sides(comparison: Comparison, names: Sequence[str] = ("BASE", "SAM")) -> list[Side]:
    """Return both sides of a comparison for charts."""
    steps = comparison.steps
    middle = steps[len(steps) // 2]
    both = zip(names, (BASE, SAM), (comparison.base, comparison.sam), strict=True)
    return [
        Side(name, colour, [run.steps for run in runs], steps, rollout_curve(runs[0], middle))
        for name, colour, runs in both
    ]


def heading(comparison: Comparison, panel: Panel) -> tuple[str, list[str]]:
    """Return a panel's result in words, and lines that give the numbers."""
    time, quantity = comparison.times.get(panel.row), comparison.quantities.get(panel.row)
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
        return f"{time.title.capitalize()}: {seen}", details
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
        return f"{quantity.title.partition(',')[0].capitalize()}: {seen}", details
    return panel.title, ["not recorded on both sides"]


def _title(axis: Axes, headline: str, details: Sequence[str]) -> None:
    axis.set_title(headline, pad=7 + 11 * len(details))
    text = axis.annotate(
        "\n".join(details), (0, 1), xytext=(0, 4), xycoords="axes fraction",
        textcoords="offset points", fontsize=8,
    )  # fmt: skip
    text.set_in_layout(False)  # `pad` makes room for this text; the layout must not add more.
