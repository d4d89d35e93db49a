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
    requests: list[RequestRecord] = []
    traces: list[TraceRecord] = []
    for one in finished:
        who = one.identity
        shared: dict[str, Any] = {
            **place._asdict(),
            "split": who.split if who else place.split,
            "group": who.group if who else group_of(one.prompt_ids),
            "sibling": who.sibling if who else 0,
            "start_s": one.start_s,
            "end_s": one.end_s,
        }
        prompt_ids, response_ids = one.prompt_ids, one.response_ids
        request = RequestRecord(
            **shared,
            **totals.get(one.request_id, RequestTotals())._asdict(),
            prompt_tokens=len(prompt_ids),
            response_tokens=len(response_ids),
            finish_reason=one.finish_reason,
            resumed_tokens=one.resumed_tokens,
            weights=one.weights,
        )
        requests.append(request)
        traces.append(TraceRecord(**shared, prompt_ids=prompt_ids, response_ids=response_ids))
    return ReplicaRecords(
        replica=place.replica,
        engine_steps=recorder.drain(**place._asdict(), session_steps=steps),
        requests=table_of(RequestRecord, requests),
        traces=table_of(TraceRecord, traces) if traced else None,
        drafter_counters=session["counters"] if session else {},
    )
