"""Runs the recipe once in a separate process, and measures its engine's processor time."""

import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import psutil
from omegaconf import OmegaConf

from benchmarks.measuring import REPOSITORY
from sam_rollout.telemetry.records import RunFolder, RunFolderError

TINY = "tiny_cpu"
# Experiment -> folder of its data.
DATA = {TINY: "synthetic", "smollm2_cpu": "word_problems"}
CPU_FILE = "engine_cpu_s.json"
ENGINE_PROCESS = "EngineCore"  # vLLM's name of the engine's process
POLL_S = 0.5
LENGTH = "trainer.total_training_steps="
WITH_TRACES = "rollout_telemetry.record_traces=true"


def train_once(run_dir: Path, *overrides: str, timeout_s: float, experiment: str = TINY) -> None:
    """Call `train` unless the folder has a finished run; remove an unfinished run first.

    One of the overrides is the number of training steps.
    """
    if finished(run_dir, overrides):
        print(f"==> {run_dir.name}: already finished", flush=True)
        return
    print(f"==> {run_dir.name}", flush=True)
    shutil.rmtree(run_dir, ignore_errors=True)
    train(run_dir, *overrides, timeout_s=timeout_s, experiment=experiment)


def finished(run_dir: Path, overrides: tuple[str, ...]) -> bool:
    """Return whether the folder has a complete run with these overrides."""
    steps = int(next(o for o in overrides if o.startswith(LENGTH)).removeprefix(LENGTH))
    try:
        given = OmegaConf.load(run_dir / ".hydra" / "overrides.yaml")
        done = max(RunFolder(run_dir).read_train_steps(), default=0)
    except (OSError, RunFolderError):
        return False
    return done == steps and set(overrides) <= set(given)


def train(run_dir: Path, *overrides: str, timeout_s: float, experiment: str = TINY) -> None:
    """Train an experiment; print the progress, and write the log to ``run_dir/log.txt``.

    Missing data is created first.

    Raises:
        RuntimeError: The run failed or took longer than ``timeout_s``.
        CalledProcessError: The data could not be created.
    """
    data = REPOSITORY / "data" / DATA[experiment]
    if not all((data / f"{part}.parquet").exists() for part in ("train", "test")):
        make = [sys.executable, "-m", "recipes.dapo_qwen3.prepare_data", DATA[experiment]]
        subprocess.run([*make, "--output-dir", data], cwd=REPOSITORY, check=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    main = [sys.executable, "-m", "recipes.dapo_qwen3.main", f"experiment={experiment}"]
    limited = ["timeout", "--kill-after=30", str(timeout_s), *main, f"run_dir={run_dir}"]
    with (run_dir / "log.txt").open("w") as log:
        process = subprocess.Popen(
            [*limited, *overrides], cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT
        )
        ended = threading.Event()
        watch = threading.Thread(target=_watch_engine, args=(process.pid, run_dir, ended))
        watch.start()
        follower = REPOSITORY / "scripts" / "lib" / "follow_run.py"
        try:
            command = [sys.executable, follower, run_dir, "--pid", str(process.pid)]
            subprocess.run(command, check=True)
        except BaseException:
            process.terminate()
            raise
        finally:
            ended.set()
            watch.join()
        if process.wait() != 0:
            raise RuntimeError(f"the run ended with {process.returncode}; see {run_dir}/log.txt")


def _watch_engine(pid: int, run_dir: Path, ended: threading.Event) -> None:
    """Write the processor seconds that a run's engines use after the first training step.

    The engines are polled twice a second until the run ends. On a CPU an engine is one process.
    """
    steps, engines, used, first = run_dir / "sam" / "train_steps.jsonl", {}, {}, None
    while not ended.wait(POLL_S):
        try:
            for child in psutil.Process(pid).children(recursive=True):
                if child.pid not in engines and ENGINE_PROCESS in " ".join(child.cmdline()):
                    engines[child.pid] = child
            for number, engine in engines.items():
                times = engine.cpu_times()
                used[number] = times.user + times.system
        except psutil.Error:
            continue
        if first is None and steps.exists() and steps.stat().st_size:
            first = sum(used.values())
    if first is not None:
        (run_dir / CPU_FILE).write_text(json.dumps(sum(used.values()) - first), encoding="utf-8")


def read_cpu_s(run_dir: Path) -> float:
    """Return the processor seconds that a run's engines used after the first training step."""
    return json.loads((run_dir / CPU_FILE).read_text(encoding="utf-8"))
