"""Run folders with a few training steps, made as a run makes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from sam_rollout.telemetry.records import RunFolder, RunInfo

MakeRun = Callable[..., Path]


@pytest.fixture
def make_run(tmp_path) -> MakeRun:
    """make_run(name, {step: metrics}, sam=..., **fields of RunInfo) -> path of the run folder."""

    def make(
        name: str, steps: Mapping[int, Mapping[str, float]], *, sam: bool = False, **fields: Any
    ) -> Path:
        config = {
            "sam": {"enabled": sam, "max_draft_tokens": 3},
            "data": {"train_batch_size": 32},
            "run_dir": f"/runs/{name}",
            "trainer": {"experiment_name": name, "default_local_dir": f"/runs/{name}/checkpoints"},
            "engine": {"additional_config": {"sam_rollout": {"enabled": sam}}},
        }
        if sam:
            config["engine"]["speculative_config"] = {"num_speculative_tokens": 3}
        fields = {
            "label": f"sam={'on' if sam else 'off'}",
            "config": config,
            "versions": {"vllm": "0.28.0"},
            "seeds": {"rollout": 1},
            "host": {"cpus": 2},
            "started_at": "2026-07-01T00:00:00+00:00",
            **fields,
        }
        folder = RunFolder(tmp_path / name)
        folder.write_start(RunInfo(**fields))
        for step, metrics in steps.items():
            folder.append_train_step(step, metrics)
        return folder.path

    return make
