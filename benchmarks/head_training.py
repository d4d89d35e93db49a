"""Measures what an EAGLE-3 head learns from recorded texts, and how long its training takes.

    python -m benchmarks.head_training [--output FILE]
    python -m benchmarks.head_training --smollm2 --traces benchmarks/results/smollm2_run

The texts are recorded responses of the tiny model at temperature 1, or of SmolLM2's learning run
(`benchmarks/learning.py`). One prompt in twenty, but at least four prompts, are held out.
Acceptance is measured for each draft position over the held-out responses; acceptance length
includes the bonus token.
"""

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.measuring import MODEL, UseSmolLM2, parser, write_record
from sam_rollout.bench.machine_record import machine
from sam_rollout.telemetry.records import RunFolder

TEXTS = MODEL.parent / "tiny_qwen3.parquet"
UPDATES = (500, 1500)  # `sam-rollout head train` makes 1500 updates by default


def train(model: Path, texts: Path, threads: int, updates: int, folder: Path) -> dict[str, Any]:
    """Train a head, and save it in `folder`; return its acceptance on held-out texts, and times."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(
        [
            sys.executable, "-m", "sam_rollout.cli", "head", "train", "--model", model,
            "--traces", texts, "--output", folder, "--updates", str(updates),
        ],
        check=True, env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )  # fmt: skip
    wall_s = time.monotonic() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    record = json.loads(Path(folder, "training.json").read_text(encoding="utf-8"))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}
    return {**record["held_out"][-1], **record["texts"], **took}


def main() -> None:
    options = parser(__doc__, "head_training_tiny_cpu")
    options.add_argument("--smollm2", action=UseSmolLM2)
    options.add_argument("--traces", type=Path, default=TEXTS)
    options.add_argument("--first-steps", type=int, help="use only texts of a run's first steps")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--updates", type=int, nargs="+", default=UPDATES)
    options.add_argument("--work-dir", type=Path, default=Path("outputs/heads"))
    arguments = options.parse_args()
    about = machine("torch", "transformers")
    texts = arguments.traces
    if arguments.first_steps:
        texts = arguments.work_dir / "texts.parquet"
        texts.parent.mkdir(parents=True, exist_ok=True)
        rows = RunFolder(arguments.traces).read("traces")
        pq.write_table(rows.filter(pc.field("step") <= arguments.first_steps), texts)
    given = arguments.model, texts, arguments.threads
    rows = [
        train(*given, updates, arguments.work_dir / f"{arguments.model.parent.name}-{updates}")
        for updates in arguments.updates
    ]
    record = {
        "machine": about,
        "setting": {"threads": arguments.threads, "first_steps": arguments.first_steps},
        "rows": rows,
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
