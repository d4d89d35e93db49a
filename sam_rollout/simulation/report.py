"""Tables and pictures of what was simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam_rollout.simulation.rollout import Outcome
from sam_rollout.simulation.validation import MAX_ERROR, Row

if TYPE_CHECKING:
    from rich.console import Console

BASE_COLOUR, SAM_COLOUR = "#0072B2", "#D55E00"
LIGHT = {BASE_COLOUR: "#B3D3E8", SAM_COLOUR: "#F7CDB0"}


def print_sides(sides: Mapping[str, Mapping[str, float]], console: Console) -> None:
    """Settings beside each other; the first one is the baseline."""
    from rich.table import Table

    table = Table(
        "setting", "rollout, s", "head, s", "long tail, s", "tokens per verify step",
        "gain (baseline / it - 1)", title="simulated",
    )  # fmt: skip
    base = next(iter(sides.values()))["rollout_s"]
    for name, figures in sides.items():
        table.add_row(
            name,
            *(f"{figures[key]:,.1f}" for key in ("rollout_s", "head_s", "tail_s")),
            f"{figures['acceptance_length']:.2f}",
            f"{base / figures['rollout_s'] - 1:.1%}",
        )
    console.print(table)


def print_validation(rows: Sequence[Row], console: Console) -> None:
    """Measured and predicted rollouts of the tiny model."""
    from rich.table import Table

    table = Table(
        "setting", "measured, s", "predicted, s", "ratio", "from its own texts, s",
        "tail measured, s", "tail predicted, s", "verdict",
        title=f"rollouts of the tiny model, target within {MAX_ERROR:.0%}",
    )  # fmt: skip
    for row in rows:
        drafts = f"k={row.k}, threshold {row.threshold}" if row.k else "baseline"
        table.add_row(
            f"{drafts}, {row.max_num_seqs} at once, rollout {row.step}",
            f"{row.measured_s:.2f}", f"{row.predicted_s:.2f}", f"{row.ratio:.3f}",
            f"{row.exact_s:.2f}", f"{row.measured_tail_s:.2f}", f"{row.predicted_tail_s:.2f}",
            "ok" if row.reached else "MISSED",
        )  # fmt: skip
    console.print(table)


def plot_outcomes(outcomes: Mapping[str, Outcome], path: Path, threshold: int) -> None:
    """Write a PNG: head and tail of every setting, and running requests over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    bars, lines = figure.subplots(1, 2, width_ratios=[1, 1.4])
    names = list(outcomes)
    colours = [BASE_COLOUR] + [SAM_COLOUR] * (len(names) - 1)
    for i, (name, colour) in enumerate(zip(names, colours, strict=True)):
        outcome = outcomes[name]
        bars.barh(i, outcome.head_s, color=LIGHT[colour])
        bars.barh(i, outcome.tail_s, left=outcome.head_s, color=colour)
        bars.text(outcome.rollout_s, i, f" {outcome.rollout_s:,.4g} s", va="center", fontsize=8.5)
    bars.set_yticks(range(len(names)), names, fontsize=8.5)
    bars.invert_yaxis()
    bars.set_xlim(right=1.18 * max(outcome.rollout_s for outcome in outcomes.values()))
    bars.set_xlabel(f"rollout, s (dark: long tail, at most {threshold} running)")
    bars.set_title("Rollout of the slowest replica, simulated", loc="left", fontsize=10)
    shades = _shades(len(names) - 1)
    for name, colour in zip(names, [BASE_COLOUR, *shades], strict=True):
        log = outcomes[name].log
        lines.step(log[:, 0], log[:, 1], where="post", color=colour, linewidth=1.3, label=name)
    lines.axhline(threshold, color="#888888", linewidth=0.8, linestyle=":")
    lines.set_yscale("symlog", linthresh=1)
    lines.set_ylim(bottom=0)
    most = max(outcome.log[:, 1].max() for outcome in outcomes.values())
    ticks = [0, *(2**i for i in range(16) if 2**i <= most)]
    lines.set_yticks(ticks, [str(tick) for tick in ticks])
    lines.minorticks_off()
    lines.set_xlabel("time, s")
    lines.set_title("Running requests over time, slowest replica (dotted: threshold)",
                    loc="left", fontsize=10)  # fmt: skip
    lines.legend(frameon=False, fontsize=8.5, loc="lower left")
    for axis in (bars, lines):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, format="png")


def _shades(count: int) -> list[Any]:
    """Oranges from dark to light."""
    from matplotlib import colormaps

    return [colormaps["Oranges"](0.9 - 0.5 * i / max(count - 1, 1)) for i in range(count)]
