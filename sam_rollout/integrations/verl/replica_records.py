"""Joins the records that an engine's workers, step recorder and server made for the trainer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pyarrow as pa

from sam_rollout.core.identity import RequestIdentity, group_of
from sam_rollout.integrations.vllm.serving.step_recorder import EngineStepRecorder, on_this_clock
from sam_rollout.telemetry.records import RequestRecord, RequestTotals, TraceRecord, table_of


@dataclass
class ReplicaRecords:
    """The records that one engine has made since its records were last collected."""

    replica: int  # the engine's number among all engines of the rollout
    engine_steps: pa.Table
    requests: pa.Table
    traces: pa.Table | None
    drafter_counters: dict[str, float]


class Place(NamedTuple):
    """The columns that every record has: training step, split and engine."""

    step: int
    split: str
    replica: int


@dataclass
class FinishedRequest:
    """A request that has finished or was interrupted; times are in seconds since the epoch."""

    request_id: str
    identity: RequestIdentity | None
    prompt_ids: list[int]
    response_ids: list[int]
    start_s: float
    end_s: float
    finish_reason: str
    resumed_tokens: int = 0  # number of prompt tokens that were sampled before an interruption
    weights: int | None = None  # the training step whose update produced the engine's weights
    # Arguments of SamplingParams except max_tokens; None if the response cannot be sampled again.
    sampling: dict[str, Any] | None = None

    def _shared_columns(self, place: Place) -> dict[str, Any]:
        who = self.identity
        return {
            **place._asdict(),
            "split": who.split if who else place.split,
            "group": who.group if who else group_of(self.prompt_ids),
            "sibling": who.sibling if who else 0,
            "start_s": self.start_s,
            "end_s": self.end_s,
        }

    def record(self, place: Place, totals: RequestTotals) -> RequestRecord:
        return RequestRecord(
            **self._shared_columns(place),
            **totals._asdict(),
            prompt_tokens=len(self.prompt_ids),
            response_tokens=len(self.response_ids),
            finish_reason=self.finish_reason,
            resumed_tokens=self.resumed_tokens,
            weights=self.weights,
        )

    def trace(self, place: Place) -> TraceRecord:
        columns = self._shared_columns(place)
        return TraceRecord(**columns, prompt_ids=self.prompt_ids, response_ids=self.response_ids)


def join_records(
    place: Place,
    recorder: EngineStepRecorder,
    workers: Sequence[dict | None],
    asked_s: float,
    finished: Sequence[FinishedRequest],
    *,
    traced: bool,
) -> ReplicaRecords:
    """Join the records of an engine's workers, its recorder and the server.

    `workers` has the workers' answers to the call `sam_drain`; a worker without a draft session
    answers None. `asked_s` is the time of the call, on this process's monotonic clock. If `traced`
    is true, the result includes token ids.
    """
    session = next((part for part in workers if part), None)
    steps = on_this_clock(session, asked_s) if session else None
    # vLLM appends "-" and eight random characters to request ids.
    totals = {
        request_id.rpartition("-")[0] or request_id: RequestTotals(*counts)
        for request_id, counts in (session["requests"] if session else {}).items()
    }
    return ReplicaRecords(
        replica=place.replica,
        engine_steps=recorder.drain(**place._asdict(), session_steps=steps),
        requests=table_of(
            RequestRecord,
            (one.record(place, totals.get(one.request_id, RequestTotals())) for one in finished),
        ),
        traces=table_of(TraceRecord, (one.trace(place) for one in finished)) if traced else None,
        drafter_counters=session["counters"] if session else {},
    )
