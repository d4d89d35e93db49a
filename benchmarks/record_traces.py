"""Records what the tiny model wrote while it was trained, as traces for the drafter benchmark.

    python -m benchmarks.record_traces [--steps 4] [--output FILE]

A DAPO run on few prompts, so that every prompt comes back in later epochs: its groups of siblings
and their second epochs are what a drafter meets in training. Columns as in a run folder's
`sam/traces`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pyarrow.parquet as pq

from benchmarks.training_run import train
from sam_rollout.telemetry.records import RunFolder

PROMPTS = 16  # two rounds of generation: every other round begins an epoch
MAX_BYTES = 300_000


def main() -> None:
    """Train, take the traces, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--timeout-s", type=float, default=3600)
    default = Path("benchmarks/results/traces/tiny_cpu.parquet")
    parser.add_argument("--output", type=Path, default=default)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "traces"
        train(
            run_dir,
            "sam=on",
            "rollout_telemetry.record_traces=true",
            f"trainer.total_training_steps={arguments.steps}",
            f"data.train_max_samples={PROMPTS}",
            timeout_s=arguments.timeout_s,
        )
        table = RunFolder(run_dir).read("traces")
    table = table.sort_by([("step", "ascending"), ("group", "ascending"), ("sibling", "ascending")])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, arguments.output, compression="zstd", compression_level=19)
    size = arguments.output.stat().st_size
    print(f"written: {arguments.output}, {len(table)} responses, {size} bytes")
    if size > MAX_BYTES:
        raise SystemExit(f"more than {MAX_BYTES} bytes: record fewer --steps")


if __name__ == "__main__":
    main()
