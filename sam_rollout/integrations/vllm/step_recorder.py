"""One record per engine step, taken in the server process for baseline and SAM alike.

vLLM's own logger prints averages over ten seconds; the long tail needs every step. The drafter's
side of a step (gate, time) is noted in the worker process and joined here in order; both read the
host's monotonic clock, so that a step without a note is recognised.

vLLM counts as drafts whatever it verified. Tokens that only filled a step up are noted by the
drafter's side and taken off here.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from vllm.v1.metrics.loggers import StatLoggerBase

from sam_rollout.integrations.vllm.ledger import VerifiedPadding
from sam_rollout.telemetry.progress import EngineProgress
from sam_rollout.telemetry.records import EngineSteps

# Of the drafter's notes; all but time and filling are columns of the engine step's record, too.
DRAFTER_COLUMNS = (
    "time_s",
    "gate_open",
    "drafter_us",
    "padding",
    "draft_budget",
    "drafted_per_source",
    "accepted_per_source",
    "sampler_us",
    "telemetry_us",
)
NO_DRAFTS: dict[str, Any] = {
    "draft_requests": 0,
    "draft_tokens": 0,
    "accepted_tokens": 0,
    "accepted_per_position": (),
}


class DrafterNote(NamedTuple):
    """The drafter's side of one engine step."""

    gate_open: bool | None
    drafter_us: float
    padding: VerifiedPadding
    draft_budget: int | None
    drafted_per_source: Sequence[int]
    accepted_per_source: Sequence[int]
    sampler_us: float | None
    telemetry_us: float


NO_DRAFTER = DrafterNote(None, 0.0, VerifiedPadding(), None, (), (), None, 0.0)
SKIPPED_DRAFTER = NO_DRAFTER._replace(gate_open=False, draft_budget=0)


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
    telemetry_us: float


class EngineStepRecorder(StatLoggerBase):
    """Collects a ``StepSample`` per engine step until drained.

    Attach it to a running engine with ``engine.logger_manager.stat_loggers.append(recorder)``; the
    engine must have been started with ``disable_log_stats=False``.
    """

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self._samples: list[StepSample] = []
        self._totals = _Totals()
        self._last_s: float | None = None

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
        started_ns = time.perf_counter_ns()
        now = time.monotonic()
        spec = scheduler_stats.spec_decoding_stats
        progress = _progress(iteration_stats)
        sample = StepSample(
            monotonic_s=now,
            duration_s=0.0 if self._last_s is None else now - self._last_s,
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs,
            **progress,
            draft_requests=spec.num_drafts if spec else 0,
            draft_tokens=spec.num_draft_tokens if spec else 0,
            accepted_tokens=spec.num_accepted_tokens if spec else 0,
            accepted_per_position=tuple(spec.num_accepted_tokens_per_pos) if spec else (),
            telemetry_us=(time.perf_counter_ns() - started_ns) / 1000,
        )
        self._samples.append(sample)
        self._totals.add(sample)
        idle = sample.running == 0 and sample.waiting == 0
        self._last_s = None if idle else now

    def progress(self) -> EngineProgress:
        """Return where the engine stands since the last drain, without changing anything."""
        if not self._samples:
            return EngineProgress()
        last, totals = self._samples[-1], self._totals
        return EngineProgress(
            running=last.running,
            waiting=last.waiting,
            tokens=totals.tokens,
            draft_requests=totals.draft_requests,
            accepted_tokens=totals.accepted_tokens,
            engines=1,
            drafting=int(last.draft_requests > 0),
        )

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
        samples, self._samples, self._totals = self._samples, [], _Totals()
        if not samples:
            self._last_s = None  # work was announced, and went to another engine
        notes = _match(samples, drafter_steps)
        clock_offset_s = time.time() - time.monotonic()  # moves when the host's time is set
        records = EngineSteps()
        drafted_before = True  # the step before the first belongs to an earlier drain
        for sample, noted in zip(samples, notes, strict=True):
            fields = sample._asdict()
            note = noted or (NO_DRAFTER if drafter_steps is None else SKIPPED_DRAFTER)
            was_noted = drafter_steps is None or noted is not None
            if not (drafted_before and was_noted):
                # Not noted: nobody knows how much of it was filling. The step after: vLLM schedules
                # placeholder drafts when it has skipped the proposer (a row close to
                # max_model_len); they are none of ours.
                fields |= NO_DRAFTS
            else:
                fields |= _without_padding(sample, note.padding)
            time_s = fields.pop("monotonic_s") + clock_offset_s
            drafter_side = note._asdict()
            del drafter_side["padding"]
            drafter_side["telemetry_us"] += fields.pop("telemetry_us")
            records.append(step, split, replica, time_s, **fields, **drafter_side)
            drafted_before = was_noted
        return records


@dataclass
class _Totals:
    """Sums of the steps since the last drain."""

    tokens: int = 0
    draft_requests: int = 0
    accepted_tokens: int = 0

    def add(self, sample: StepSample) -> None:
        self.tokens += sample.generation_tokens
        self.draft_requests += sample.draft_requests
        self.accepted_tokens += sample.accepted_tokens


def _without_padding(sample: StepSample, padding: VerifiedPadding) -> dict[str, Any]:
    """Return the fields of ``NO_DRAFTS`` less what was filling.

    Never below 0: the engine verifies less than it was given when a step is full.
    """
    if not padding.tokens:
        return {}
    by_position = zip_longest(sample.accepted_per_position, padding.accepted, fillvalue=0)
    drafts_by_position = [max(0, all_of_them - filling) for all_of_them, filling in by_position]
    return {
        "draft_requests": max(0, sample.draft_requests - padding.requests),
        "draft_tokens": max(0, sample.draft_tokens - padding.tokens),
        "accepted_tokens": sum(drafts_by_position),
        "accepted_per_position": tuple(drafts_by_position),
    }


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


def on_this_clock(drained: dict[str, Any], asked_s: float) -> dict[str, list]:
    """Return the drafter's steps of ``SamProposer.drain()`` by the clock of this process.

    Engines of one server may run on several hosts, each with a clock of its own. Steps of another
    host come out early by what the request took to get there; late would part them from theirs.

    Args:
        drained: What the worker returned.
        asked_s: This process's ``time.monotonic()`` when it asked.
    """
    steps = drained["steps"]
    if drained["host"] == platform.node():
        return steps
    offset_s = asked_s - drained["clock_s"]
    return {**steps, "time_s": [time_s + offset_s for time_s in steps["time_s"]]}


def _match(
    samples: list[StepSample], drafter_steps: dict[str, list] | None
) -> list[DrafterNote | None]:
    """Find each engine step's note; None where none was taken.

    The worker notes its side before the front end hears of the step, and both in order. The front
    end may lag by more than a step, so the nearest time would be the wrong match.
    """
    if drafter_steps is None:
        return [None] * len(samples)
    noted = zip(*(drafter_steps[name] for name in DRAFTER_COLUMNS), strict=True)
    matches: list[DrafterNote | None] = []
    next_note = next(noted, None)
    for sample in samples:
        if next_note is None or next_note[0] > sample.monotonic_s:
            matches.append(None)
            continue
        note = DrafterNote(*next_note[1:])
        # It may have come from another process, as a plain sequence.
        matches.append(note._replace(padding=VerifiedPadding(*note.padding)))
        next_note = next(noted, None)
    return matches
