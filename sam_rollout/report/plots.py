"""Draws a comparison or a learning summary as one picture each, about 1200 pixels wide."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sam_rollout.report.compare import Comparison, QuantityRow
from sam_rollout.report.learning import Learning, LearningRow, running_band
from sam_rollout.statistics import Estimate, Gain

# Okabe and Ito's blue and vermillion are told apart by readers with any colour vision; the light
# forms are the same hues, for the part of a bar outside the tail.
COLOUR = {"base": "#0072B2", "sam": "#D55E00"}
LIGHT = {"base": "#B3D3E8", "sam": "#F7CDB0"}
MARKER = {"base": "o", "sam": "s"}
MAX_BARS = 24  # per side; more steps than that share bars
ZERO_BASED = {"rollout", "tail_ms_per_token", "step"}  # times, so that ratios can be seen
DPI = 120

_STYLE = {
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "axes.edgecolor": "#888888",
}


def plot_comparison(comparison: Comparison, path: str | Path) -> None:
    """Writes six small multiples of both sides as a PNG; a panel says if a run lacks its metric.

    Lines are means over the runs of a side, thin ones its runs.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 6.4), layout="constrained")
        figure.get_layout_engine().set(wspace=0.05, hspace=0.06)
        axes = figure.subplots(2, 3)
        _rollout_bars(axes[0, 0], comparison)
        _line(axes[0, 1], comparison, "tail_ms_per_token", "time per tail token, ms")
        _line(axes[0, 2], comparison, "step", "training step, s")
        _line(axes[1, 0], comparison, "acceptance_length", "acceptance length, tokens")
        _line(axes[1, 1], comparison, "reward", "mean reward")
        _line(axes[1, 2], comparison, "response_length", "mean response length, tokens")
        _titles(axes, comparison)
        for axis in axes[-1]:
            axis.set_xlabel("training step")
        handles = [Line2D([], [], color=COLOUR[side], marker=MARKER[side]) for side in COLOUR]
        labels = comparison.labels
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
        if comparison.fair is False:
            figure.text(
                0.99,
                0.985,
                "unfair comparison: see what sam-rollout compare says",
                ha="right",
                va="top",
                color="#B00020",
            )
        figure.savefig(path, dpi=DPI, format="png")


def _titles(axes: np.ndarray, comparison: Comparison) -> None:
    rollout, tail, step = (comparison.time(key) for key in ("rollout", "tail", "step"))
    _time_title(axes[0, 0], "Rollout", rollout.raw if rollout else None)
    _time_title(axes[0, 1], "Tail token", tail.equal_tokens if tail else None)
    _time_title(axes[0, 2], "Whole step", step.raw if step else None)
    drafted = comparison.quantity("acceptance_length")
    _title(
        axes[1, 0],
        "Acceptance length"
        if drafted is None
        else f"{drafted.sam.median:.2f} tokens a verify step",
        "per request, bonus token included",
        "1 = no drafts",
    )
    _quantity_title(axes[1, 1], "Reward", comparison.quantity("reward"))
    _quantity_title(axes[1, 2], "Length", comparison.quantity("response_length"))


def _title(axis: Axes, headline: str, *details: str) -> None:
    """A bold line that says what one sees, and lines of figures below it."""
    axis.set_title(headline, pad=7 + 11 * len(details))
    text = axis.annotate(
        "\n".join(details),
        (0, 1),
        xytext=(0, 4),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=8,
        color="#444444",
    )
    text.set_in_layout(False)  # the pad of the title makes its room; its width must not cost any


def _time_title(axis: Axes, what: str, gain: Gain | None) -> None:
    if gain is None:
        _title(axis, what, "no gain: no time on one side")
        return
    faster, saved = gain.speed_up_minus_one, gain.time_saved
    ratio = f"{1 + faster.value:.2f}x"
    _title(
        axis,
        f"{what}: {ratio} as fast" if faster.clear else f"{what}: no clear gain ({ratio})",
        f"speed-up - 1 = {faster.value:.1%}{_interval(faster, 100, '.1f')}",
        f"time saved = {saved.value:.1%}{_interval(saved, 100, '.1f')}",
    )


def _quantity_title(axis: Axes, what: str, row: QuantityRow | None) -> None:
    if row is None:
        _title(axis, what)
        return
    value, low, high = row.difference.value, row.difference.low, row.difference.high
    seen = "SAM higher" if value > 0 else "SAM lower"
    if not row.difference.clear:
        seen = "no clear difference"
    if value == low == high == 0:
        seen = "the same at every step"
    _title(
        axis,
        f"{what}: {seen}",
        "mean of SAM - BASE over steps, 95 % CI:",
        f"{value:+.2g}{_interval(row.difference, 1, '.2g')}",
    )


def _interval(estimate: Estimate, factor: float, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" [{factor * estimate.low:{form}}, {factor * estimate.high:{form}}]"


def _rollout_bars(axis: Axes, comparison: Comparison) -> None:
    """Stacked bars, tail on top of head, the two sides next to each other."""
    head, tail = comparison.series.get("head"), comparison.series.get("tail")
    if head is None or tail is None:
        _line(axis, comparison, "rollout", "rollout, s")
        return
    size = -(-len(head) // MAX_BARS)  # steps that share a bar
    head, tail = _binned(head, size), _binned(tail, size)
    width = 0.4 * size
    for side, shift in (("base", -0.5), ("sam", 0.5)):
        x = head.index + shift * width
        axis.bar(x, head[side], width, color=LIGHT[side])
        axis.bar(x, tail[side], width, bottom=head[side], color=COLOUR[side])
    binned = "" if size == 1 else f"; means of {size} steps"
    axis.set_ylabel(f"rollout, s (dark: tail{binned})")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _binned(frame: pd.DataFrame, size: int) -> pd.DataFrame:
    """Means of `size` consecutive rows, at the middle of their steps."""
    steps = frame.reset_index(names="step")
    return steps.groupby(np.arange(len(frame)) // size).mean().set_index("step")


def _line(axis: Axes, comparison: Comparison, key: str, label: str) -> None:
    frame = comparison.series.get(key)
    axis.set_ylabel(label)
    if frame is None:
        axis.text(0.5, 0.5, "not recorded in both runs", ha="center", transform=axis.transAxes)
        return
    for side in COLOUR:
        every = comparison.runs[key][side]
        if every.shape[1] > 1:
            axis.plot(every.index, every, color=COLOUR[side], linewidth=0.6, alpha=0.45)
        known = frame[side].dropna()
        axis.plot(
            known.index,
            known,
            color=COLOUR[side],
            marker=MARKER[side],
            markersize=3.5 if len(known) <= 60 else 0,
            linewidth=1.4,
        )
    if key in ZERO_BASED:
        axis.set_ylim(bottom=0)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def plot_learning(learning: Learning, path: str | Path) -> None:
    """Writes accuracy over steps as a PNG, one panel for each recorded accuracy."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        axes: Sequence[Axes] = figure.subplots(1, len(learning.rows), squeeze=False)[0]
        for axis, row in zip(axes, learning.rows, strict=True):
            _accuracy(axis, row)
        figure.savefig(path, dpi=DPI, format="png")


def _accuracy(axis: Axes, row: LearningRow) -> None:
    band = running_band(row.series)
    axis.fill_between(band.index, band["low"], band["high"], color=LIGHT["base"], linewidth=0)
    axis.plot(row.series.index, row.series, ".", color="#666666", markersize=5)
    axis.plot(band.index, band["mean"], color=COLOUR["base"], linewidth=2)
    for steps, mean in (
        (row.series.index[: row.window], row.first),
        (row.series.index[-row.window :], row.last),
    ):
        axis.plot([steps[0], steps[-1]], [mean, mean], color=COLOUR["sam"], linewidth=3)
        axis.annotate(
            f"{mean:.1%}",
            ((steps[0] + steps[-1]) / 2, mean),
            xytext=(0, -15),
            textcoords="offset points",
            ha="center",
            color=COLOUR["sam"],
            weight="bold",
            path_effects=[withStroke(linewidth=3, foreground="white")],
        )
    points = 100 * row.difference
    unclear = row.welch_low <= 0 <= row.welch_high
    seen = "no clear change" if unclear else f"{'up' if points > 0 else 'down'} {abs(points):.1f}"
    _title(
        axis,
        f"{row.title[0].upper()}{row.title[1:]}: {seen}{'' if unclear else ' points'}",
        f"mean of last {row.window} - first {row.window}: {points:+.1f} points, 95 % CI (Welch) "
        f"[{100 * row.welch_low:+.1f}, {100 * row.welch_high:+.1f}]",
    )
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("accuracy (blue: running mean, 95 % band)")
    axis.set_xlabel("training step")
