"""Runs the recipe once in a process of its own and hands back what it recorded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def train(run_dir: Path, *overrides: str, timeout_s: float) -> None:
    """Train the tiny profile; progress goes to the terminal, the log to ``run_dir/log.txt``.

    Raises:
        RuntimeError: The run failed or took longer than ``timeout_s``.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    main = [sys.executable, "-m", "recipes.dapo_qwen3.main", "experiment=tiny_cpu"]
    with (run_dir / "log.txt").open("w") as log:
        process = subprocess.Popen(
            ["timeout", "--kill-after=30", str(timeout_s), *main, f"run_dir={run_dir}", *overrides],
            cwd=REPOSITORY,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        follower = REPOSITORY / "scripts" / "lib" / "follow_run.py"
        try:
            command = [sys.executable, follower, run_dir, "--pid", str(process.pid)]
            subprocess.run(command, check=True)
        except BaseException:  # an interrupt, too: never leave the run behind
            process.terminate()
            raise
        if process.wait() != 0:
            raise RuntimeError(f"the run ended with {process.returncode}; see {run_dir}/log.txt")
