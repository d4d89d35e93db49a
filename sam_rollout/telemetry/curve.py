"""Running requests of an engine over the time of one rollout: where the long tail can be seen.

The curve is sampled from the engine steps that a training step drained, on a grid of at most
`MAX_POINTS` instants, so that its cost does not grow with the length of the rollout.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from sam_rollout.telemetry.records import ENGINE_STEPS
from sam_rollout.telemetry.tables import of_split, tail_mask

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVE_NAME = "sam/engine/running_over_time"  # of the picture; a line of the same curve: below it
LINE_NAME = "sam/engine/running_over_time_line"
MAX_POINTS = 500
IDLE_S = 0.02  # a shorter pause between two steps is none; copies of runs round times of day
_SIZE_INCHES, _DPI = (6.4, 3.0), 90  # 576 x 270 pixels
_STYLE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "legend.fontsize": 7.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
# Fixed, as fractions of the picture: fitting them to the texts takes longer than drawing.
_MARGINS = {"left": 0.1, "right": 0.965, "bottom": 0.16, "top": 0.91}
_TITLE_AT = 1.02  # of the axis' height; else it is searched for, too
_MEAN, _TAIL, _THRESHOLD = "#0072B2", "#FBE6D8", "#5B6570"


@dataclass(frozen=True)
class RunningCurve:
    """Running requests of the engines at `time_s`, seconds since the rollout began; all [points].

    `mean`, `low` and `high` are taken over the engines; one that is idle has 0. `waiting` is the
    mean of those in the queue. `tail` marks the instants that count as `sam/tail/time_s`: of the
    engine that was busy longest.
    """

    time_s: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    waiting: np.ndarray
    tail: np.ndarray
    tail_threshold: int
    engines: int

    @property
    def top(self) -> float:
        """The highest of what is drawn."""
        return max(float(self.high.max()), self.tail_threshold, 1)


def running_curve(
    engine_steps: Iterable[pa.Table],
    *,
    tail_threshold: int,
    split: str = "train",
    points: int = MAX_POINTS,
) -> RunningCurve | None:
    """The curve of one training step's engine steps (all replicas); None if there are none."""
    table = pa.concat_tables([ENGINE_STEPS.empty_table(), *engine_steps])
    table = of_split(table, split)
    if not table.num_rows:
        return None
    table = table.sort_by([("replica", "ascending"), ("time_s", "ascending")])
    column = {
        name: table[name].to_numpy()
        for name in (
            "replica", "time_s", "duration_s", "running", "waiting", "scheduled", "prompt_tokens",
        )
    }  # fmt: skip
    started = column["time_s"] - column["duration_s"]
    begin, end = started.min(), column["time_s"].max()
    # Cells, sampled in their middles: neither edge belongs to a step for sure.
    cells = min(points, max(len(started), 2))
    instants = begin + (np.arange(cells) + 0.5) * (end - begin) / cells
    tail = tail_mask(
        column["scheduled"], column["waiting"], column["prompt_tokens"], tail_threshold
    )
    replicas, firsts = np.unique(column["replica"], return_index=True)
    busy_s = np.add.reduceat(column["duration_s"], firsts)  # [replicas]
    running = np.zeros((len(replicas), cells))
    waiting = np.zeros((len(replicas), cells))
    in_tail = np.zeros(cells, dtype=bool)
    for row, (first, last) in enumerate(
        zip(firsts, [*firsts[1:], len(started)], strict=True)
    ):  # an engine at a time, never a step
        # The step under way at an instant is the first that ends after it, if it has begun.
        step = first + np.searchsorted(column["time_s"][first:last], instants)
        under_way = step < last
        step = np.minimum(step, last - 1)
        ended = np.append(begin, column["time_s"][first : last - 1])[step - first]
        under_way &= (started[step] <= instants) | (started[step] - ended < IDLE_S)
        running[row] = np.where(under_way, column["running"][step], 0)
        waiting[row] = np.where(under_way, column["waiting"][step], 0)
        if row == busy_s.argmax():
            in_tail = under_way & tail[step]
    return RunningCurve(
        time_s=instants - begin,
        mean=running.mean(axis=0),
        low=running.min(axis=0),
        high=running.max(axis=0),
        waiting=waiting.mean(axis=0),
        tail=in_tail,
        tail_threshold=tail_threshold,
        engines=len(replicas),
    )


def plot(curve: RunningCurve, axis: "Axes", *, name: str = "", colour: str = _MEAN) -> None:
    """Draw the curve, the tail threshold and the long tail into an axis of matplotlib's.

    A name tells several curves in one axis apart; what goes without saying is then not labelled.
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
    """The curve as a small picture, uint8 [height, width, 3], drawn without a display."""
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
        axis.set_title(title, loc="left", y=_TITLE_AT)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def warm_up() -> None:
    """Loads matplotlib and its fonts, and draws once."""
    idle = np.zeros(2)
    curve = RunningCurve(np.arange(2.0), idle, idle, idle, idle, idle > 0, 1, engines=1)
    draw(curve, "warm-up")
