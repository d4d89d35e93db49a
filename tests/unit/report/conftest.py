"""Makes run folders, either with given metrics or with a whole synthetic run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sam_rollout.report.compare import Comparison, compare_folders
from sam_rollout.telemetry.aggregate import aggregate
from sam_rollout.telemetry.records import RunFolder, RunInfo
from tests.records import by_source, engine_step, engine_steps, request, trace, traces
from tests.records import requests as requests_table

MakeRun = Callable[..., Path]
START_S = 1_780_000_000.0
TAIL_THRESHOLD = 4
K = 3


def run_info(name: str, sam: bool, **fields: Any) -> RunInfo:
    config = {
        "sam": {"enabled": sam, "max_draft_tokens": K},
        "data": {"train_batch_size": 32, "max_response_length": 1024, "seed": 1},
        "rollout_sampler": {"kind": "coupled", "batch_invariant": False},
        "coupling": "gumbel",
        "rollout_telemetry": {"proof": {"every": 0}},
        "run_dir": f"/runs/{name}",
        "trainer": {"experiment_name": name, "default_local_dir": f"/runs/{name}/checkpoints"},
        "engine": {"additional_config": {"sam_rollout": {"enabled": sam}}},
    }
    if sam:
        config["engine"]["speculative_config"] = {"num_speculative_tokens": K}
    config |= fields.pop("more_config", {})
    fields = {
        "label": f"sam={'on' if sam else 'off'}",
        "config": config,
        "versions": {"vllm": "0.28.0"},
        "seeds": {"rollout": 1},
        "host": {"cpus": 2},
        "started_at": "2026-07-01T00:00:00+00:00",
        "git": {"commit": "a" * 40, "dirty": False},
        **fields,
    }
    return RunInfo(**fields)


@pytest.fixture
def make_run(tmp_path) -> MakeRun:
    """Return make_run(name, {step: metrics}, sam=..., **fields of RunInfo), which writes a run."""

    def make(
        name: str, steps: Mapping[int, Mapping[str, float]], *, sam: bool = False, **fields: Any
    ) -> Path:
        folder = RunFolder(tmp_path / name)
        folder.write_start(run_info(name, sam, **fields))
        for step, metrics in steps.items():
            folder.append_train_step(step, metrics)
        return folder.path

    return make


@dataclass
class Synthetic:
    """A made-up run, with the rollout of every step.

    `seed` fixes prompts and texts; `noise_seed` fixes times. `update_s` is the time outside the
    rollout.
    """

    steps: int = 6
    sam: bool = False
    seed: int = 1
    noise_seed: int = 0
    groups: int = 4
    siblings: int = 4
    mean_tokens: float = 60.0
    update_s: float = 5.0
    noise: float = 0.02
    traces: bool = True
    fields: dict[str, Any] = field(default_factory=dict)  # fields of RunInfo

    def write(self, path: Path) -> Path:
        folder = RunFolder(path)
        folder.write_start(run_info(path.name, self.sam, **self.fields))
        noise = np.random.default_rng([self.noise_seed, self.sam])
        for step in range(1, self.steps + 1):
            self._write_step(folder, step, noise)
        return path

    def _write_step(self, folder: RunFolder, step: int, noise: Any) -> None:
        texts = np.random.default_rng([self.seed, step])
        names = [(f"prompt-{self.seed}-{step}-{g}", s)
                 for g in range(self.groups) for s in range(self.siblings)]  # fmt: skip
        lengths = texts.gamma(2.0, self.mean_tokens / 2, len(names)).astype(int) + 4
        reward, left, rows = float(texts.normal()), lengths, []
        now = start = START_S + 1000.0 * step
        while count := int((left > 0).sum()):
            drafting = self.sam and count <= TAIL_THRESHOLD
            gained = np.minimum(left, 2 if drafting else 1)  # one of K draft tokens is right
            left = left - gained
            drafts, kept = count * drafting, int(gained.sum()) - count
            duration = (0.01 + 0.001 * count) * (1 + self.noise * noise.standard_normal())
            now += duration
            rows.append(engine_step(
                step=step, time_s=now, duration_s=duration, running=count,
                generation_tokens=int(gained.sum()), draft_requests=drafts,
                draft_tokens=K * drafts, accepted_tokens=kept,
                accepted_per_position=[kept, 0, 0] if drafting else [],
                drafted_per_source=by_source(own=K * drafts) if drafting else [],
                accepted_per_source=by_source(own=kept) if drafting else [],
                gate_open=drafting if self.sam else None,
            ))  # fmt: skip
        steps_table = engine_steps(*rows)
        told = [
            {"step": step, "group": group, "sibling": sibling, "start_s": start, "end_s": now}
            for group, sibling in names
        ]
        finished = requests_table(*(
            request(**one, prompt_tokens=20, response_tokens=length)
            for one, length in zip(told, lengths, strict=True)
        ))  # fmt: skip
        folder.write("engine_steps", 0, steps_table)
        folder.write("requests", 0, finished)
        if self.traces:
            folder.write("traces", 0, traces(*(
                trace(**one, response_ids=texts.integers(0, 50, length).tolist())
                for one, length in zip(told, lengths, strict=True)
            )))  # fmt: skip
        metrics = aggregate([steps_table], [finished], tail_threshold=TAIL_THRESHOLD)
        update_s = self.update_s * (1 + self.noise * noise.standard_normal())
        gen_s = metrics["sam/engine/rollout_s"] + 0.1
        folder.append_train_step(
            step,
            metrics
            | {
                "timing_s/gen": gen_s,
                "timing_s/step": gen_s + update_s,
                "timing_s/update_actor": update_s,
                "sam/rounds/time_mean_s": gen_s,
                "perf/total_num_tokens": float(lengths.sum()),
                "response_length/mean": float(lengths.mean()),
                "critic/rewards/mean": reward,
                "training/rollout_probs_diff_mean": 4e-4,
            },
        )


@pytest.fixture
def synthetic(tmp_path) -> Callable[..., Path]:
    """Return synthetic(name, **fields of Synthetic), which writes the folder of a made-up run."""

    def make(name: str, **fields: Any) -> Path:
        return Synthetic(**fields).write(tmp_path / name)

    return make


@pytest.fixture
def compared(synthetic) -> Callable[..., Comparison]:
    """Return compared(fields of BASE, **fields of SAM), which compares two synthetic runs."""

    def make(base: Mapping[str, Any] | None = None, **sam: Any) -> Comparison:
        off, on = synthetic("off", **(base or {})), synthetic("on", **{"sam": True, **sam})
        return compare_folders(off, on)

    return make


@pytest.fixture
def pair(synthetic) -> tuple[Path, Path]:
    return synthetic("off"), synthetic("on", sam=True)


@pytest.fixture
def pairs(synthetic) -> Callable[..., tuple[list[Path], list[Path]]]:
    """Return pairs(seeds, **fields), which writes two runs for each seed, one for each side."""

    def make(seeds: Any, **fields: Any) -> tuple[list[Path], list[Path]]:
        def run(name: str, seed: int) -> Path:
            own = {"seeds": {"rollout": seed}}
            return synthetic(f"{name}-{seed}", seed=seed, sam=name == "on", fields=own, **fields)

        return [run("off", seed) for seed in seeds], [run("on", seed) for seed in seeds]

    return make


@pytest.fixture
def resume() -> Callable[..., None]:
    def add_start(run: Path, **changes: Any) -> None:
        folder = RunFolder(run)
        first, *later = folder.read_starts()
        day = len(later) + 2
        folder.write_start(replace(first, started_at=f"2030-07-0{day}T00:00:00+00:00", **changes))

    return add_start
