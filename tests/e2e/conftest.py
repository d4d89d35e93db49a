"""Runs the recipe's main program as a user does, under a hard timeout."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sam_rollout.telemetry.records import RunFolder

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 900
# The tiny profile, smaller still: what a step contains matters here, not how long it is.
SMALL = (
    "experiment=tiny_cpu",
    "data.train_batch_size=4",
    "dynamic_sampling.gen_batch_size=8",
    "dynamic_sampling.max_rounds=0",
    "data.max_response_length=256",
    "data.val_max_samples=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.max_model_len=400",
    "reward.reward_kwargs.overlong_buffer_cfg.len=64",
)


@dataclass
class FinishedRun:
    """A training run that ended well."""

    folder: RunFolder
    log: str

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        """Training step -> metrics."""
        return self.folder.read_train_steps()


def _end(process: subprocess.Popen) -> None:
    """End a process and everything it started, Ray's daemons included."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=30)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the synthetic data set."""
    folder = tmp_path_factory.mktemp("data")
    command = [sys.executable, "-m", "recipes.dapo_qwen3.prepare_data", "synthetic"]
    subprocess.run([*command, "--output-dir", str(folder)], cwd=REPOSITORY, check=True, timeout=120)
    return folder


@pytest.fixture
def train(tmp_path: Path, data: Path) -> Callable[..., FinishedRun]:
    """``train(*overrides)`` runs the recipe in a folder of its own and returns what it left."""

    def run(*overrides: str) -> FinishedRun:
        run_dir, log_path = tmp_path / "run", tmp_path / "log.txt"
        command = [sys.executable, "-m", "recipes.dapo_qwen3.main", *SMALL, f"run_dir={run_dir}"]
        command += [f"data.train_files={data}/train.parquet", f"data.val_files={data}/test.parquet"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [*command, *overrides],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            try:
                exit_code = process.wait(timeout=TIMEOUT_S)
            except subprocess.TimeoutExpired:
                _end(process)
                exit_code = None
        text = log_path.read_text(errors="replace")
        assert exit_code == 0, f"exit code {exit_code} (None: {TIMEOUT_S} s over)\n{text[-6000:]}"
        return FinishedRun(RunFolder(run_dir), text)

    return run
