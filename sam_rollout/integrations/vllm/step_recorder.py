"""One record per engine step, taken in the server process for baseline and SAM alike.

vLLM's own logger prints averages over ten seconds; the long tail needs every step. The drafter's
side of a step (gate, time) is noted in the worker process and joined here by time: both read the
host's monotonic clock.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any, NamedTuple

from vllm.v1.metrics.loggers import StatLoggerBase

from sam_rollout.telemetry.records import EngineSteps


class StepSample(NamedTuple):
    """What the front end knows about one engine step."""

    monotonic_s: float
    duration_s: float
    scheduled: int
    running: int
    waiting: int
    preempted: int
    prompt_tokens: int
    generation_tokens: int
    draft_requests: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: tuple[int, ...]


class EngineStepRecorder(StatLoggerBase):
    """Collects a ``StepSample`` per engine step until drained.

    Attach it to a running engine with ``engine.logger_manager.stat_loggers.append(recorder)``; the
    engine must have been started with ``disable_log_stats=False``.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._samples: list[StepSample] = []
        self._last_s: float | None = None
        self._clock_offset_s = time.time() - time.monotonic()

    def log_engine_initialized(self) -> None:
        """Nothing to announce."""

    def work_arrived(self) -> None:
        """Start the clock of the next step if the engine was idle."""
        if self._last_s is None:
            self._last_s = time.monotonic()

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM once per engine step."""
        if scheduler_stats is None or iteration_stats is None:
            return
        now = time.monotonic()
        # A request that joins or decodes shows up in exactly one of the two lists.
        scheduled = len(iteration_stats.time_to_first_tokens_iter) + len(
            iteration_stats.inter_token_latencies_iter
        )
        spec = scheduler_stats.spec_decoding_stats
        self._samples.append(
            StepSample(
                monotonic_s=now,
                duration_s=0.0 if self._last_s is None else now - self._last_s,
                scheduled=scheduled,
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs,
                preempted=iteration_stats.num_preempted_reqs,
                prompt_tokens=iteration_stats.num_prompt_tokens,
                generation_tokens=iteration_stats.num_generation_tokens,
                draft_requests=spec.num_drafts if spec else 0,
                draft_tokens=spec.num_draft_tokens if spec else 0,
                accepted_tokens=spec.num_accepted_tokens if spec else 0,
                accepted_per_position=tuple(spec.num_accepted_tokens_per_pos) if spec else (),
            )
        )
        idle = scheduler_stats.num_running_reqs == 0 and scheduler_stats.num_waiting_reqs == 0
        self._last_s = None if idle else now

    def drain(
        self, *, step: int, split: str, replica: int, drafter_steps: dict[str, list] | None
    ) -> EngineSteps:
        """Hand over what was recorded since the last call, joined with the drafter's records.

        Args:
            step: Training step the records belong to.
            split: ``"train"`` or ``"val"``.
            replica: Rank of this engine among the rollout's replicas.
            drafter_steps: ``SamProposer.drain()["steps"]``; None without a drafter.
        """
        samples, self._samples = self._samples, []
        gate_open: list[bool | None] = [None] * len(samples)
        drafter_us = [0.0] * len(samples)
        if drafter_steps is not None and samples:
            gate_open = [False] * len(samples)
            ends = [sample.monotonic_s for sample in samples]
            for time_s, is_open, spent_us in zip(
                drafter_steps["time_s"],
                drafter_steps["gate_open"],
                drafter_steps["drafter_us"],
                strict=True,
            ):
                # The front end hears of a step after the worker has drafted for the next one.
                row = min(bisect_left(ends, time_s), len(samples) - 1)
                gate_open[row] = is_open
                drafter_us[row] += spent_us
        records = EngineSteps()
        for sample, is_open, spent_us in zip(samples, gate_open, drafter_us, strict=True):
            fields = sample._asdict()
            time_s = fields.pop("monotonic_s") + self._clock_offset_s
            records.append(
                step, split, replica, time_s, **fields, gate_open=is_open, drafter_us=spent_us
            )
        return records
