"""Runs the recipe's main program under a hard timeout."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from sam_rollout.telemetry.records import RunFolder
from tests.cluster.machines import REPOSITORY
from tests.cluster.runs import SMALLER, make_data

TIMEOUT_S = 900
SMALL = ("experiment=tiny_cpu", "data.val_max_samples=8", *SMALLER)


@dataclass
class FinishedRun:
    folder: RunFolder
    log: str

    @property
    def steps(self) -> dict[int, dict[str, float]]:
        return self.folder.read_train_steps()


def _end(process: subprocess.Popen) -> None:
    """End a process and everything it started, Ray's daemons included."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=30)


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def train(tmp_path: Path, data: list[str]) -> Callable[..., FinishedRun]:
    """Return the function ``train(*overrides)``, which runs the recipe in a temporary folder.

    Every process searches ``paths`` for modules. If ``fails`` is true, the run must end with an
    error. A run is killed once ``killed_when``, a function of the run's folder, returns true. All
    calls of a test use one run folder, so the next call can resume a killed run.
    """

    def run(
        *overrides: str,
        paths: Sequence[Path] = (REPOSITORY,),
        fails: bool = False,
        killed_when: Callable[[RunFolder], bool] | None = None,
    ) -> FinishedRun:
        run_dir, log_path = tmp_path / "run", tmp_path / "log.txt"
        command = [sys.executable, "-m", "recipes.dapo_qwen3.main", *SMALL, f"run_dir={run_dir}"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            # Two threads of the trainer wait for each other in loops, which takes minutes beside
            # other tests.
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        with log_path.open("w") as log:
            process = subprocess.Popen(
                [*command, *data, *overrides],
                cwd=REPOSITORY,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            deadline = time.monotonic() + TIMEOUT_S
            while process.poll() is None and time.monotonic() < deadline:
                if killed_when is not None and killed_when(RunFolder(run_dir)):
                    break
                time.sleep(0.2)
            exit_code = process.poll()
            if exit_code is None:
                _end(process)
        text = log_path.read_text(errors="replace")
        expected = None if killed_when is not None else int(fails)
        assert exit_code == expected, f"exit code {exit_code} (None: killed)\n{text[-6000:]}"
        return FinishedRun(RunFolder(run_dir), text)

    return run
