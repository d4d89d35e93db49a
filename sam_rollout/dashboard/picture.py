"""The sections as pictures, from run folders: what the dashboard shows, without a server."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import pandas as pd
import pyarrow.compute as pc
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sam_rollout.dashboard.layout import SECTIONS, Panel, Section
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.curve import plot, running_curve
from sam_rollout.telemetry.records import RunFolder

# Okabe and Ito: told apart by readers with any colour vision.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LINES = ("-", "--", ":", "-.")
STYLE = {"font.size": 8, "axes.titlesize": 9, "axes.titleweight": "bold", "legend.fontsize": 7,
         "axes.titlelocation": "left", "axes.grid": True, "grid.color": "#E4E4E4",
         "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}  # fmt: skip
WIDTHS = (3.5, 1.3)  # the first run stays visible below others that are equal to it
COLUMNS, DPI = 3, 100


@dataclass(frozen=True)
class Run:
    """What is drawn of a run; `steps` has a row a training step, NaN where nothing is known."""

    folder: RunFolder
    label: str
    tail_threshold: int
    steps: pd.DataFrame

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Raises RunFolderError if the folder is not that of a run."""
        folder = RunFolder(path)
        start = folder.read_starts()[0]
        steps = pd.DataFrame.from_dict(folder.read_train_steps(), orient="index", dtype=float)
        return cls(folder, start.label, start.config["rollout_telemetry"]["tail_threshold"], steps)

    def beside(self, baseline: "Run") -> "Run":
        """The run with the figures that a baseline adds, if it has none."""
        if any(name.startswith("compare/") for name in self.steps.columns):
            return self
        compared = Baseline(baseline.folder.path)
        added = {
            step: compared.metrics(step, row.dropna().to_dict())
            for step, row in self.steps.iterrows()
        }
        steps = self.steps.join(pd.DataFrame.from_dict(added, orient="index", dtype=float))
        return replace(self, steps=steps)


def draw_sections(folders: Sequence[Path], output: Path) -> list[Path]:
    """Write a PNG for each section: a colour a run, a kind of line a metric.

    The first run is the baseline of those that were trained without one in sight
    (`compare.baseline_run`).

    Raises:
        RunFolderError: a folder is not that of a run.
    """
    baseline, *others = map(Run.read, folders)
    others = [run.beside(baseline) for run in others]
    runs = dict(zip(_names(folders), (baseline, *others), strict=True))
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for section in SECTIONS:
        path = output / f"{section.title.lower().replace(' ', '_')}.png"
        _draw(section, runs, path)
        written.append(path)
    return written


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, their paths where two have the same."""
    names = [folder.absolute().name for folder in folders]
    return names if len(set(names)) == len(names) else list(map(str, folders))


def _draw(section: Section, runs: Mapping[str, Run], path: Path) -> None:
    rows = -(-len(section.panels) // COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 0.7 + 2.6 * rows), dpi=DPI, layout="constrained")
        figure.suptitle(f"{section.title}: {section.question}", x=0.01, ha="left", fontsize=11)
        axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
        for axis, panel in zip(axes, section.panels, strict=False):
            axis.set_title(panel.title)
            if panel.picture:
                _curve(axis, runs)
            else:
                _lines(axis, panel, runs)
        for axis in axes[len(section.panels) :]:
            axis.set_axis_off()
        figure.savefig(path)


def shown(panel: Panel, run: Run) -> list[str]:
    """The metrics of a run that a panel shows."""
    if panel.pattern:
        return [name for name in sorted(run.steps.columns) if re.fullmatch(panel.pattern, name)]
    return [name for name in panel.metrics if name in run.steps.columns]


def _lines(axis: Axes, panel: Panel, runs: Mapping[str, Run]) -> None:
    empty = True
    for number, (label, run) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        for metric, name in enumerate(shown(panel, run)):
            series = run.steps[name].dropna()
            short = name.removeprefix("sam/").removeprefix("val-core/")
            axis.plot(
                series.index, series, LINES[metric % len(LINES)], color=colour, marker="o",
                markersize=2.5, linewidth=WIDTHS[number > 0], label=f"{label}: {short}",
            )  # fmt: skip
            empty = empty and series.empty
    if empty:
        axis.text(0.5, 0.5, "no run has it", ha="center", transform=axis.transAxes, color="#888888")
        return
    if panel.zero_based:
        axis.set_ylim(bottom=0)
    axis.set_ylabel(panel.unit)
    axis.set_xlabel("training step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.margins(y=0.25)
    axis.legend(loc="best")


def _curve(axis: Axes, runs: Mapping[str, Run]) -> None:
    """The rollout of the last run's last training step, as the trainer draws it."""
    run = list(runs.values())[-1]
    table = run.folder.read("engine_steps")
    step = pc.max(table.filter(pc.equal(table["split"], "train"))["step"]).as_py()
    rows = table.filter(pc.equal(table["step"], step))
    curve = running_curve([rows], tail_threshold=run.tail_threshold)
    if curve is not None:
        plot(curve, axis)
        axis.set_title(f"Running requests, {run.label}, step {step}")
