"""Draws how a head learned: its loss, and what its policy would accept of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from sam_rollout.report.charts import COLOURS, STYLE

DPI = 120


def plot_training(history: Mapping[str, Any], path: Path) -> None:
    """Write loss and held-out acceptance over the training as a PNG.

    Args:
        history: `loss`, means over equal parts of the training, and `held_out`, the figures of
            `acceptance.Acceptance` with the `share` of the training they were taken at.
    """
    losses, tested = history["loss"], history["held_out"]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.set_title("Loss")
        left.plot([(i + 0.5) / len(losses) for i in range(len(losses))], losses, color=COLOURS[0])
        left.set_ylabel("cross entropy, nats per draft token")
        right.set_title(f"Held-out texts: {tested[-1]['length']:.2f} tokens per verify step")
        for j, chances in enumerate(zip(*(found["per_position"] for found in tested), strict=True)):
            shares = [found["share"] for found in tested]
            right.plot(
                shares, chances, ".-", color=COLOURS[j % len(COLOURS)], label=f"draft {j + 1}"
            )
        right.set_ylabel("probability of acceptance")
        right.set_ylim(0, 1)
        right.legend(loc="lower right")
        for axis in (left, right):
            axis.set_xlabel("training done")
            axis.xaxis.set_major_formatter(PercentFormatter(1))
        figure.savefig(path, dpi=DPI, format="png")
