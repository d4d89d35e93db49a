"""Records every engine step in the server process, whether our drafter runs or not.

The session in the worker process notes its part of a record (gate, time, verified tokens), which is
joined to the server's part here. In a run of the tiny model, recording takes 34 us per step.
"""

import dataclasses
import platform
import time
from typing import Any

import pyarrow as pa

from sam_rollout.telemetry.progress import EngineProgress
from sam_rollout.telemetry.records import NOTE_COLUMNS, DraftNote, StepRecord, table_of

# The note of a step that the session did not see. Such a step verified no drafts.
SKIPPED = dataclasses.astuple(DraftNote(gate_open=False, draft_budget=0, draft_trees=False))


class EngineStepRecorder:
    """Collects a ``StepRecord`` per engine step, until `drain` returns the records."""

    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._last_s: float | None = None

    def work_arrived(self) -> None:
        """Start the clock of the next step if the engine was idle."""
        if self._last_s is None:
            self._last_s = time.monotonic()

    def paused(self) -> None:
        """Stop the clock, because the engine computes nothing until work arrives."""
        self._last_s = None

    def record(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        """Record an engine step from vLLM's statistics."""
        if scheduler_stats is None:
            return
        now = time.monotonic()
        spec = scheduler_stats.spec_decoding_stats
        record = StepRecord(
            step=-1,  # `drain` fills in step, split and replica
            split="",
            replica=-1,
            time_s=now,
            duration_s=0.0 if self._last_s is None else now - self._last_s,
            running=scheduler_stats.num_running_reqs,
            waiting=scheduler_stats.num_waiting_reqs,
            draft_requests=spec.num_drafts if spec else 0,
            draft_tokens=spec.num_draft_tokens if spec else 0,
            accepted_tokens=spec.num_accepted_tokens if spec else 0,
            accepted_per_position=tuple(spec.num_accepted_tokens_per_pos) if spec else (),
            **_requests_and_tokens(iteration_stats),
        )
        self._records.append(record)
        idle = record.running == 0 and record.waiting == 0
        self._last_s = None if idle else now

    def progress(self) -> EngineProgress:
        """Return the engine's progress since the last drain."""
        if not self._records:
            return EngineProgress()
        last = self._records[-1]
        return EngineProgress(
            running=last.running,
            waiting=last.waiting,
            tokens=sum(record.generation_tokens for record in self._records),
            draft_requests=sum(record.draft_requests for record in self._records),
            accepted_tokens=sum(record.accepted_tokens for record in self._records),
            engines=1,
            drafting=int(last.draft_requests > 0),
        )

    def drain(
        self, *, step: int, split: str, replica: int, session_steps: dict[str, list] | None
    ) -> pa.Table:
        """Return the records since the last call, joined with the session's notes; forget them.

        ``session_steps`` is ``DraftSession.drain()["steps"]``. If it is None (no session), records
        keep vLLM's own counts of drafts.
        """
        records, self._records = self._records, []
        if not records:
            self._last_s = None  # the work that started the clock went to another engine
        clock_offset_s = time.time() - time.monotonic()  # changes when the host's time is set
        if session_steps is not None:
            # Unlike the session, vLLM's statistics count padding as drafts.
            _add_notes(records, session_steps)
        for record in records:
            record.step, record.split, record.replica = step, split, replica
            record.time_s += clock_offset_s
        return table_of(StepRecord, records)


def _requests_and_tokens(iteration_stats: Any) -> dict[str, Any]:
    """Return a step's numbers of requests and tokens, all zero if no request got a token."""
    if iteration_stats is None:
        return {"scheduled": 0}
    # Every request that got tokens has an entry in exactly one of the two lists below.
    joining = len(iteration_stats.time_to_first_tokens_iter)
    return {
        "scheduled": joining + len(iteration_stats.inter_token_latencies_iter),
        "preempted": iteration_stats.num_preempted_reqs,
        "prompt_tokens": iteration_stats.num_prompt_tokens,
        "generation_tokens": iteration_stats.num_generation_tokens,
    }


def on_this_clock(drained: dict[str, Any], asked_s: float) -> dict[str, list]:
    """Return the steps of ``DraftSession.drain()``, with times converted to this process's clock.

    ``asked_s`` is this process's ``time.monotonic()`` when it called ``drain``. If the steps come
    from another host, their times are too early by up to the duration of that call, which is
    harmless.
    """
    steps = drained["steps"]
    if drained["host"] == platform.node():
        return steps
    offset_s = asked_s - drained["clock_s"]
    return {**steps, "noted_s": [noted_s + offset_s for noted_s in steps["noted_s"]]}


def _add_notes(records: list[StepRecord], session_steps: dict[str, list]) -> None:
    """Write each engine step's note into its record, ``SKIPPED`` if there is none.

    Steps and notes are joined in their order. They are not joined by the nearest time, because the
    front end may lag by several steps, and the nearest note may belong to another step.
    """
    columns = (session_steps[name] for name in ("noted_s", *NOTE_COLUMNS))
    noted = zip(*columns, strict=True)
    waiting = next(noted, None)
    for record in records:
        note = SKIPPED
        if waiting is not None and waiting[0] <= record.time_s:
            note, waiting = waiting[1:], next(noted, None)
        for name, value in zip(NOTE_COLUMNS, note, strict=True):
            setattr(record, name, value)
