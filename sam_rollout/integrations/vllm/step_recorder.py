"""One record per engine step, taken in the server process for baseline and SAM alike.

vLLM's own logger prints averages over ten seconds; the long tail needs every step. The drafter's
side of a step (gate, time) is noted in the worker process and joined here in order; both read the
host's monotonic clock, so that a step without a note is recognised.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from vllm.v1.metrics.loggers import StatLoggerBase

from sam_rollout.telemetry.records import EngineSteps

DRAFTER_COLUMNS = ("time_s", "gate_open", "drafter_us")
NO_DRAFTS: dict[str, Any] = {
    "draft_requests": 0,
    "draft_tokens": 0,
    "accepted_tokens": 0,
    "accepted_per_position": (),
}


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
        if scheduler_stats is None:
            return
        now = time.monotonic()
        spec = scheduler_stats.spec_decoding_stats
        self._samples.append(
            StepSample(
                monotonic_s=now,
                duration_s=0.0 if self._last_s is None else now - self._last_s,
                running=scheduler_stats.num_running_reqs,
                waiting=scheduler_stats.num_waiting_reqs,
                **_progress(iteration_stats),
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
        matches = _match(samples, drafter_steps)
        records = EngineSteps()
        drafted_before = True  # the step before the first belongs to an earlier drain
        for sample, match in zip(samples, matches, strict=True):
            fields = sample._asdict()
            if not drafted_before:
                # vLLM schedules placeholder drafts when it has skipped the proposer (a row close
                # to max_model_len); they are none of ours.
                fields |= NO_DRAFTS
            time_s = fields.pop("monotonic_s") + self._clock_offset_s
            gate_open, drafter_us = match or (None if drafter_steps is None else False, 0.0)
            records.append(
                step, split, replica, time_s, **fields, gate_open=gate_open, drafter_us=drafter_us
            )
            drafted_before = drafter_steps is None or match is not None
        return records


def _progress(iteration_stats: Any) -> dict[str, int]:
    """Requests and tokens of a step; all zero where no request got a token (prompt chunks)."""
    if iteration_stats is None:
        names = ("scheduled", "preempted", "prompt_tokens", "generation_tokens")
        return dict.fromkeys(names, 0)
    # A request that joins or decodes shows up in exactly one of the two lists.
    joining = len(iteration_stats.time_to_first_tokens_iter)
    return {
        "scheduled": joining + len(iteration_stats.inter_token_latencies_iter),
        "preempted": iteration_stats.num_preempted_reqs,
        "prompt_tokens": iteration_stats.num_prompt_tokens,
        "generation_tokens": iteration_stats.num_generation_tokens,
    }


def _match(
    samples: list[StepSample], drafter_steps: dict[str, list] | None
) -> list[tuple[bool, float] | None]:
    """Find each engine step's (gate open, drafter time in us); None where none was noted.

    The worker notes its side before the front end hears of the step, and both in order. The front
    end may lag by more than a step, so the nearest time would be the wrong match.
    """
    if drafter_steps is None:
        return [None] * len(samples)
    noted = zip(*(drafter_steps[name] for name in DRAFTER_COLUMNS), strict=True)
    matches: list[tuple[bool, float] | None] = []
    next_note = next(noted, None)
    for sample in samples:
        if next_note is None or next_note[0] > sample.monotonic_s:
            matches.append(None)
            continue
        matches.append(next_note[1:])
        next_note = next(noted, None)
    return matches
