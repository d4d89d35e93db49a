"""What recording an engine step costs, beside the step itself.

    python -m benchmarks.telemetry_overhead --run RUN_FOLDER [--output ...]

Instrumented time throughout: clocks around our own code, no differences of wall times. Alone, by
the number of requests in a step: the books and the log of the engine's worker (``ledger.py``,
``step_log.py``) and the recorder of the front end (``step_recorder.py``). And in the training run
whose folder is given, as it was recorded: the share of the time of all engine steps, and what the
trainer spends on collecting records and drawing the rollout, of each training step.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.measuring import parser, write_record
from sam_rollout.bench.machine import machine
from sam_rollout.telemetry.records import RunFolder

ROWS = (1, 8, 64, 256)
DRAFT_TOKENS = 3
ALONE_STEPS = 5000
GOAL = 0.005  # share of a step's time
# Column of what a training step logs -> ours.
_RECORDING = {
    "timing_s/step": "step_s",
    "sam/telemetry/collect_s": "collect_s",
    "sam/telemetry/curve_s": "curve_s",
    "sam/telemetry/share": "share",
}


def in_run(folder: Path) -> dict[str, float]:
    """Time per engine step of a run's training rollouts, and that spent on recording them."""
    steps = RunFolder(folder).read("engine_steps").to_pandas()
    steps = steps[steps.split == "train"]
    time_s, telemetry_us = steps.duration_s.sum(), steps.telemetry_us.sum()
    return {
        "steps": len(steps),
        "median_step_us": float(1e6 * steps.duration_s.median()),
        "telemetry_us": float(telemetry_us / len(steps)),
        "median_telemetry_us": float(steps.telemetry_us.median()),
        "share": float(1e-6 * telemetry_us / time_s),
    }


def in_trainer(folder: Path) -> dict[str, float] | None:
    """Time of a run's trainer for recording a training step; None if its folder does not tell."""
    logged = pd.DataFrame(RunFolder(folder).read_train_steps().values())
    steps = logged.reindex(columns=list(_RECORDING)).rename(columns=_RECORDING).dropna()
    if steps.empty:
        return None
    return {
        "steps": len(steps),
        "median_step_s": float(steps.step_s.median()),
        "median_collect_ms": 1e3 * float(steps.collect_s.median()),
        "median_curve_ms": 1e3 * float(steps.curve_s.median()),
        "share": float((steps.collect_s + steps.curve_s).sum() / steps.step_s.sum()),
        "largest_share": float(steps.share.max()),
    }


def alone(rows: int) -> dict[str, float]:
    """Median microseconds of a step in which every request verifies drafts, and of one without."""
    from sam_rollout.integrations.vllm.step_recorder import EngineStepRecorder
    from sam_rollout.session.ledger import RequestLedger
    from sam_rollout.session.step_log import StepLog
    from sam_rollout.verified import Verified

    names = [f"r{row}" for row in range(rows)]
    ledger, log = RequestLedger(rows, DRAFT_TOKENS, 1), StepLog(DRAFT_TOKENS, ["own"])
    recorder = EngineStepRecorder()
    ledger.follow(names, live=set(names))
    ones = np.ones(rows, np.int32)
    drafted = DRAFT_TOKENS * ones
    verified = Verified(2 * ones, drafted, ones, 0 * ones, 0 * ones, judged=drafted, right=ones)
    num_tokens = np.full(rows, 5000, np.int32)
    decoding = verified.sampled > 0
    stats = _statistics(rows)
    drafting, closed, front = [], [], []
    for times, is_open in ((drafting, True), (closed, False)):
        for _ in range(ALONE_STEPS):
            started_ns = time.perf_counter_ns()
            ledger.book(verified, num_tokens, drafted=is_open)
            ledger.offer(decoding if is_open else None)
            log.add(started_ns, started_ns, is_open, DRAFT_TOKENS, ledger.step, 0.0)
            times.append(time.perf_counter_ns() - started_ns)
    for _ in range(ALONE_STEPS):
        started_ns = time.perf_counter_ns()
        recorder.record(*stats)
        front.append(time.perf_counter_ns() - started_ns)
    return {
        "worker_drafting_us": statistics.median(drafting) / 1000,
        "worker_closed_us": statistics.median(closed) / 1000,
        "front_end_us": statistics.median(front) / 1000,
    }


def hooks_us() -> float:
    """Median microseconds that timing adds to a call of a sampler: an empty module's, hooked."""
    import torch

    from sam_rollout.integrations.vllm.sampler_clock import SamplerClock

    def median_us() -> float:
        times = []
        for _ in range(ALONE_STEPS):
            started_ns = time.perf_counter_ns()
            module(None)
            times.append(time.perf_counter_ns() - started_ns)
        return statistics.median(times) / 1000

    module = torch.nn.Identity()
    without = median_us()
    SamplerClock(SimpleNamespace(sampler=module))
    return median_us() - without


def _statistics(rows: int) -> tuple[Any, Any]:
    """What vLLM hands to the recorder."""
    spec = SimpleNamespace(
        num_drafts=rows,
        num_draft_tokens=DRAFT_TOKENS * rows,
        num_accepted_tokens=rows,
        num_accepted_tokens_per_pos=[rows, 0, 0],
    )
    scheduler = SimpleNamespace(num_running_reqs=rows, num_waiting_reqs=0, spec_decoding_stats=spec)
    iteration = SimpleNamespace(
        time_to_first_tokens_iter=[],
        inter_token_latencies_iter=[0.01] * rows,
        num_preempted_reqs=0,
        num_prompt_tokens=0,
        num_generation_tokens=2 * rows,
    )
    return scheduler, iteration


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, "telemetry_overhead")
    options.add_argument("--run", type=Path, required=True, help="folder of a run with sam=on")
    arguments = options.parse_args()
    start = RunFolder(arguments.run).read_starts()[0]
    result = {
        "machine": machine("numpy", "numba"),
        "setting": {"draft_tokens": DRAFT_TOKENS, "alone_steps": ALONE_STEPS, "goal": GOAL},
        "alone": {str(rows): alone(rows) for rows in ROWS},
        "hooks_us": hooks_us(),
        "run": {
            "name": arguments.run.resolve().name,
            "label": start.label,
            "versions": dict(start.versions),
            **in_run(arguments.run),
            "trainer": in_trainer(arguments.run),
        },
    }
    print(json.dumps({name: result[name] for name in ("alone", "hooks_us", "run")}, indent=1))
    write_record(result, arguments.output)


if __name__ == "__main__":
    main()
