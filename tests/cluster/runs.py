"""Launches runs of the recipe on a cluster of machines made of namespaces."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from sam_rollout.telemetry.records import RunFolder
from tests.cluster.machines import REPOSITORY, Lan

SMALLER = (
    "data.train_batch_size=4",
    "dynamic_sampling.gen_batch_size=8",
    "dynamic_sampling.max_rounds=0",
    "data.max_response_length=256",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.max_model_len=400",
    "reward.reward_kwargs.overlong_buffer_cfg.len=64",
)
SMALL = ("experiment=tiny_cpu_2nodes", *SMALLER)
VARIABLES = (
    "RAY_DEDUP_LOGS=0",
    "HF_HUB_OFFLINE=1",
    "VLLM_NO_USAGE_STATS=1",
    "WANDB_MODE=offline",
    "OMP_NUM_THREADS=1",  # two threads that wait in loops take minutes beside other tests
)
END_S = 240.0  # time for a launch to end after SIGTERM
POLL_S = 0.5


def make_data(folder: Path) -> list[str]:
    """Make the synthetic data set in a folder; return the overrides that name its files."""
    command = [sys.executable, "-m", "recipes.dapo_qwen3.prepare_data", "synthetic"]
    subprocess.run([*command, "--output-dir", str(folder)], cwd=REPOSITORY, check=True, timeout=300)
    files = {"data.train_files": "train.parquet", "data.val_files": "test.parquet"}
    return [f"{field}={folder / name}" for field, name in files.items()]


def small_run(folder: Path) -> list[str]:
    return [*SMALL, *make_data(folder / "data")]


class Launch:
    """A running ``scripts/launch_multinode.sh``; it ends when the ``with`` statement is left."""

    def __init__(self, lan: Lan, folder: Path, *arguments: str) -> None:
        hosts = folder / "hosts.txt"
        hosts.write_text("".join(f"{name} {address}\n" for name, address in lan.addresses.items()))
        self._log = folder / f"launch-{len(list(folder.glob('launch-*')))}.log"
        command = ["bash", REPOSITORY / "scripts/launch_multinode.sh", "--nodes", hosts]
        command += ["--device", "cpu", "--dashboard-port", "0", "--log-dir", folder / "logs"]
        for variable in VARIABLES:
            command += ["--env", variable]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *arguments],
                env={**os.environ, "SSH": str(lan.ssh())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, condition: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``condition`` holds; raise RuntimeError if the launch ends or time is up."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"status {self._process.returncode} (None: {timeout_s} s over):\n"
                    f"{self.output[-6000:]}"
                )
            time.sleep(POLL_S)

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout=timeout_s)


def trained_steps(run_dir: Path) -> list[int]:
    path = RunFolder(run_dir).train_steps_path
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines]


def last_checkpoint(run_dir: Path) -> int:
    path = run_dir / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(path.read_text()) if path.exists() else 0


def has_trained(run_dir: Path, step: int) -> bool:
    return last_checkpoint(run_dir) >= step and max(trained_steps(run_dir), default=0) >= step


def actors_by_node(output: str, actor: str) -> dict[str, int]:
    """Return, for each node, how many processes of the class ``actor`` wrote into the log.

    The keys are the nodes' addresses in Ray's log lines. Lines of the head node have no address, so
    its key is "head".
    """
    found = re.findall(rf"\({actor}[^)]*? pid=(\d+)(?:, ip=([\d.]+))?\)", output)
    return {ip or "head": len({pid for pid, at in found if at == ip}) for _, ip in found}
