"""The sections as pictures, from run folders: what the dashboard shows, without a server."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import pandas as pd
import pyarrow.compute as pc
from matplotlib.figure import Figure

from sam_rollout.report.charts import COLOURS, STYLE, Side, draw
from sam_rollout.report.panels import SECTIONS, Section
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.curve import RunningCurve, running_curve
from sam_rollout.telemetry.records import RunFolder

COLUMNS, DPI = 3, 100


def draw_sections(folders: Sequence[Path], output: Path) -> list[Path]:
    """Write a PNG for each section: a colour per run, a kind of line per metric.

    The first run is the baseline of those that were trained without one in sight
    (`compare.baseline_run`). Running requests are those of each run's last training step.

    Raises:
        RunFolderError: a folder is not that of a run.
    """
    runs = [RunFolder(path) for path in folders]
    tables = [_steps(runs[0]), *(_beside(_steps(run), runs[0]) for run in runs[1:])]
    sides = [
        Side(name, COLOURS[number % len(COLOURS)], [table], curve=_last_curve(run))
        for number, (name, run, table) in enumerate(zip(_names(folders), runs, tables, strict=True))
    ]
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for section in SECTIONS:
        path = output / f"{section.title.lower().replace(' ', '_')}.png"
        _draw(section, sides, path)
        written.append(path)
    return written


def _steps(run: RunFolder) -> pd.DataFrame:
    """Metrics of each training step, NaN where nothing is known."""
    return pd.DataFrame.from_dict(run.read_train_steps(), orient="index", dtype=float)


def _beside(steps: pd.DataFrame, baseline: RunFolder) -> pd.DataFrame:
    """The metrics with the figures that a baseline adds, if there are none yet."""
    if any(name.startswith("compare/") for name in steps.columns):
        return steps
    compared = Baseline(baseline.path)
    added = {step: compared.metrics(step, row.dropna().to_dict()) for step, row in steps.iterrows()}
    return steps.join(pd.DataFrame.from_dict(added, orient="index", dtype=float))


def _last_curve(run: RunFolder) -> RunningCurve | None:
    """The rollout of the last training step."""
    table = run.read("engine_steps")
    last = pc.max(table.filter(pc.equal(table["split"], "train"))["step"])
    threshold = run.read_starts()[0].config["rollout_telemetry"]["tail_threshold"]
    return running_curve([table.filter(pc.equal(table["step"], last))], tail_threshold=threshold)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, their paths where two have the same."""
    names = [folder.absolute().name for folder in folders]
    return names if len(set(names)) == len(names) else list(map(str, folders))


def _draw(section: Section, sides: Sequence[Side], path: Path) -> None:
    rows = -(-len(section.panels) // COLUMNS)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(12, 0.7 + 2.6 * rows), dpi=DPI, layout="constrained")
        figure.suptitle(f"{section.title}: {section.question}", x=0.01, ha="left", fontsize=11)
        axes = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
        for axis, panel in zip(axes, section.panels, strict=False):
            axis.set_title(panel.title)
            draw(axis, panel, sides)
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="best")
        for axis in axes[len(section.panels) :]:
            axis.set_axis_off()
        figure.savefig(path)
