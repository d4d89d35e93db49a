"""Plots the number of running requests over the time of a rollout."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sam_rollout.telemetry.aggregate import Rollout
from sam_rollout.telemetry.records import ENGINE_STEPS, REQUESTS
from sam_rollout.telemetry.tables import of_split

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_NAME = "sam/engine/running_over_time"  # the picture's name
MAX_POINTS = 500
IDLE_S = 0.02  # Shorter gaps between steps come from rounding; the engine was not idle.
_SIZE_INCHES, _DPI = (6.4, 3.0), 90  # 576 x 270 pixels.
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# Margins as fractions of the picture. They are fixed, because fitting them to the labels would take
# longer than drawing.
_MARGINS = {"left": 0.1, "right": 0.965, "bottom": 0.16, "top": 0.91}
_MEAN, _TAIL, _THRESHOLD = "#0072B2", "#FBE6D8", "#5B6570"


@dataclass(frozen=True)
class RunningCurve:
    """The engines' running requests during a rollout; all arrays have the shape [points]."""

    time_s: np.ndarray  # Seconds since the rollout began.
    mean: np.ndarray  # Mean number of running requests over all engines.
    low: np.ndarray  # Running requests of the engine with the fewest.
    high: np.ndarray  # Running requests of the engine with the most.
    tail: np.ndarray  # bool, whether the slowest engine was in the long tail (see `tail_mask`).
    tail_threshold: int  # Largest number of scheduled requests in the long tail.
    engines: int

    @property
    def top(self) -> float:
        """The largest value in the picture."""
        return max(float(self.high.max()), self.tail_threshold, 1)


def running_curve(engine_steps: Iterable[pa.Table], *, tail_threshold: int) -> RunningCurve | None:
    """Return the curve of a training step's engine steps; None if there are no engine steps."""
    table = of_split(pa.concat_tables([ENGINE_STEPS.empty_table(), *engine_steps]), "train")
    if not table.num_rows:
        return None
    rollout = Rollout(table, REQUESTS.empty_table(), tail_threshold)
    started = rollout.time_s - rollout.duration_s
    begin, end = started.min(), rollout.time_s.max()
    cells = min(MAX_POINTS, max(len(started), 2))
    instants = begin + (np.arange(cells) + 0.5) * (end - begin) / cells
    replicas, firsts = np.unique(rollout.replica, return_index=True)
    running = np.zeros((len(replicas), cells))
    in_tail = np.zeros(cells, dtype=bool)
    for row, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(started)], strict=True)):
        # For each instant, take the first step that ends after it. If this step began before the
        # instant, it is under way.
        step = first + np.searchsorted(rollout.time_s[first:last], instants)
        under_way = step < last
        step = np.minimum(step, last - 1)
        ended = np.append(begin, rollout.time_s[first : last - 1])[step - first]
        under_way &= (started[step] <= instants) | (started[step] - ended < IDLE_S)
        running[row] = np.where(under_way, rollout.running[step], 0)
        if rollout.slowest[first]:
            in_tail = under_way & rollout.tail[step]
    mean, low, high = running.mean(axis=0), running.min(axis=0), running.max(axis=0)
    return RunningCurve(instants - begin, mean, low, high, in_tail, tail_threshold, len(replicas))


def plot(curve: RunningCurve, axis: "Axes", *, name: str = "", colour: str = _MEAN) -> None:
    """Draw the curve, the tail threshold and the long tail.

    If `name` is given, only the curve has a label.
    """
    tail = f"long tail, {curve.tail.mean():.0%} of the time"
    axis.fill_between(
        curve.time_s, 0, 1, where=curve.tail, step="mid", linewidth=0, label="" if name else tail,
        color=colour if name else _TAIL, alpha=0.15 if name else 1,
        transform=axis.get_xaxis_transform(),
    )  # fmt: skip
    if curve.engines > 1:
        axis.fill_between(
            curve.time_s, curve.low, curve.high, step="mid", color=colour, alpha=0.3, linewidth=0,
            label="" if name else f"lowest to highest of {curve.engines} engines",
        )  # fmt: skip
    axis.plot(
        curve.time_s, curve.mean, drawstyle="steps-mid", color=colour, linewidth=1.4,
        label=f"{name}: {tail}" if name else "",
    )  # fmt: skip
    axis.axhline(
        curve.tail_threshold, color=_THRESHOLD, linestyle="--", linewidth=1,
        label="" if name else f"tail threshold {curve.tail_threshold}",
    )  # fmt: skip
    axis.set(xlabel="time since the rollout began, s", ylabel="running requests")


def draw(curve: RunningCurve, title: str = "") -> np.ndarray:
    """Draw the curve as a small picture, uint8 [height, width, 3]."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI)
        figure.subplots_adjust(**_MARGINS)
        canvas = FigureCanvasAgg(figure)
        axis = figure.subplots()
        plot(curve, axis)
        axis.set(xlim=(0, curve.time_s[-1]), ylim=(0, 1.05 * curve.top))
        axis.legend(loc="upper right")
        axis.set_title(title, loc="left")
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
