"""Draws a panel with matplotlib: metrics over training steps, with one colour per side."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sam_rollout.report.panels import Panel
from sam_rollout.report.runs import Run
from sam_rollout.telemetry.curve import RunningCurve, plot, running_curve
from sam_rollout.telemetry.records import value_at

# The colours of Okabe and Ito can be distinguished with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
INK, MUTED, RULE = "#1A1F26", "#5B6570", "#E2E5E9"
LINES = ("-", "--", ":", "-.")
WIDTHS = (3.5, 1.3)  # The first side's line is wider, so that a line on top cannot hide it.
_MARKED = 60  # Lines with more points than this have no markers.
STYLE = {
    "font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "legend.fontsize": 7, "legend.frameon": False, "axes.grid": True, "axes.grid.axis": "y",
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "grid.color": RULE, "text.color": INK, "axes.titlecolor": INK, "axes.edgecolor": MUTED,
    "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
}  # fmt: skip


@dataclass(frozen=True)
class Side:
    """The runs that a chart draws in one colour: a single run, or repeats of one run."""

    name: str  # The side's name in the legend.
    colour: str
    # One data frame per run, with training steps as index and metrics as columns.
    runs: Sequence[pd.DataFrame]
    steps: Sequence[int] | None = None  # The training steps to show; None shows all.
    curve: RunningCurve | None = None  # The running requests during one training step's rollout.

    def shown(self, panel: Panel) -> list[str]:
        """Return the panel's metrics that every run has."""
        known = set.intersection(*(set(run.columns) for run in self.runs))
        if panel.pattern:
            return sorted(name for name in known if re.fullmatch(panel.pattern, name))
        return [name for name in panel.metrics if name in known]

    def labels(self, panel: Panel) -> list[tuple[str, str]]:
        """Return, for each metric that `shown` returns, its label in the legend and its name."""
        names = self.shown(panel)
        if len(names) == 1:
            return [(self.name, names[0])]
        groups = {name.rpartition("/")[0] for name in names}
        prefix = f"{groups.pop()}/" if len(groups) == 1 else "sam/"
        return [(f"{self.name}: {name.removeprefix(prefix)}", name) for name in names]

    def values(self, name: str) -> pd.DataFrame:
        """Return a metric's values, [training steps, runs], without steps that no run recorded."""
        table = pd.concat([run[name] for run in self.runs], axis=1, ignore_index=True)
        return (table if self.steps is None else table.reindex(self.steps)).dropna(how="all")


def rollout_curve(run: Run, step: int) -> RunningCurve | None:
    """Return the curve of running requests in one step's rollout; None if it was not recorded."""
    threshold = value_at(run.start.config, "rollout_telemetry.tail_threshold", 0)
    rows = run.engine_steps.filter(pc.equal(run.engine_steps["step"], step))
    return running_curve([rows], tail_threshold=threshold)


def draw(axis: Axes, panel: Panel, sides: Sequence[Side]) -> Mapping[str, pd.Series]:
    """Draw a panel without title and legend; write "not recorded" if no side has data for it."""
    if panel.picture:
        return _running(axis, sides)
    tables = {
        (number, place, label): values
        for number, side in enumerate(sides)
        for place, (label, name) in enumerate(side.labels(panel))
        if len(values := side.values(name))
    }
    if not tables:
        nothing(axis)
        return {}
    for (number, place, label), table in tables.items():
        colour = sides[number].colour
        if table.shape[1] > 1:
            axis.plot(table.index, table, color=colour, linewidth=0.6, alpha=0.4)
        axis.plot(
            table.index, table.mean(axis=1), LINES[place % len(LINES)], color=colour, label=label,
            linewidth=WIDTHS[number > 0], marker="o" if len(table) <= _MARKED else "", markersize=3,
        )  # fmt: skip
    axis.margins(y=0.2)
    if panel.zero_based:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(panel.unit)
    axis.set_xlabel("training step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return {label: table.mean(axis=1) for (_, _, label), table in tables.items()}


def nothing(axis: Axes) -> None:
    """Write "not recorded" in place of the panel's lines."""
    axis.set_axis_off()
    axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes, color=MUTED)


def _running(axis: Axes, sides: Sequence[Side]) -> Mapping[str, pd.Series]:
    curves = [(side, side.curve) for side in sides if side.curve is not None]
    if not curves:
        nothing(axis)
    for side, curve in curves:
        plot(curve, axis, name=side.name, colour=side.colour)
    if curves:
        axis.set_xlim(0, max(curve.time_s[-1] for _, curve in curves))
        axis.set_ylim(0, 1.05 * max(curve.top for _, curve in curves))
    return {}
