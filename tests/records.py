"""Makes records. A test sets only the columns that matter to the test."""

from typing import Any

import pyarrow as pa

from sam_rollout.sources import NAMES
from sam_rollout.telemetry.records import RequestRecord, StepRecord, TraceRecord, table_of

_FILED = {"step": 1, "split": "train", "replica": 0}
_TOLD = {"group": "g", "sibling": 0, "start_s": 0.0, "end_s": 1.0}
_COUNTED = {"verify_steps": 0, "drafted_tokens": 0, "accepted_tokens": 0, "finish_reason": "stop"}


def engine_step(**columns: Any) -> StepRecord:
    """Return an engine step of 1 s with four requests; `columns` replaces values."""
    running = columns.get("running", columns.get("scheduled", 4))
    default = {"time_s": 1.0, "duration_s": 1.0, "scheduled": running, "running": running}
    return StepRecord(**_FILED | default | {"waiting": 0} | columns)


def engine_steps(*rows: StepRecord) -> pa.Table:
    return table_of(StepRecord, rows)


def request(**columns: Any) -> RequestRecord:
    """Return a finished request of 5 tokens without drafts; `columns` replaces values."""
    lengths = {"prompt_tokens": 10, "response_tokens": 5}
    return RequestRecord(**_FILED | _TOLD | lengths | _COUNTED | columns)


def requests(*rows: RequestRecord) -> pa.Table:
    return table_of(RequestRecord, rows)


def trace(**columns: Any) -> TraceRecord:
    texts = {"prompt_ids": [1, 2], "response_ids": [3, 4, 5]}
    return TraceRecord(**_FILED | _TOLD | texts | columns)


def traces(*rows: TraceRecord) -> pa.Table:
    return table_of(TraceRecord, rows)


def by_source(**counts: int) -> list[int]:
    """Return a list with a number for each source: `by_source(own=4)`."""
    return [counts.get(name, 0) for name in NAMES]
