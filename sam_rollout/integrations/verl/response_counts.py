"""What became of each response's drafts, for verl's own metrics and dumps.

verl 0.9.1 fills its metrics of speculation from counts that the engine sends along with a response,
and asks for them with a draft model only. Our counts are kept where drafts are made and collected
once a training step; responses find theirs by the request's id.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.ray_trainer import compute_spec_decode_metrics

from sam_rollout.integrations.verl.replica_records import REQUEST_ID_FIELD, ReplicaRecords

# Responses that a step left over may be trained on by the next one.
KEPT_STEPS = 2
# Column of verl's dump -> field of ResponseCounts. The first three are verl's names for them.
DUMPED = {
    "spec_num_draft_tokens": "drafted_tokens",
    "spec_num_accepted_tokens": "accepted_tokens",
    "spec_num_verify_steps": "verify_steps",
    "generation_s": "generation_s",
}


class ResponseCounts(NamedTuple):
    """Of one response.

    verl's client gives each turn of a conversation a request of its own, and its agent loop keeps
    the first one's id: with several turns these are the first turn's counts.
    """

    drafted_tokens: int = 0
    accepted_tokens: int = 0
    verify_steps: int = 0
    generation_s: float = 0.0

    def plus(self, other: ResponseCounts) -> ResponseCounts:
        """Both together."""
        return ResponseCounts(
            self.drafted_tokens + other.drafted_tokens,
            self.accepted_tokens + other.accepted_tokens,
            self.verify_steps + other.verify_steps,
            self.generation_s + other.generation_s,
        )


class ResponseBook:
    """Keeps the counts of the last steps' responses until they are trained on.

    Args:
        dumped: Whether verl dumps what it trains on, so that ``columns`` will be asked for.
    """

    def __init__(self, *, dumped: bool) -> None:
        self._dumped = dumped
        self._steps: list[dict[str, ResponseCounts]] = []
        self._by_key: dict[str, ResponseCounts | None] = {}
        self._drafting = False

    def note(self, replicas: Iterable[ReplicaRecords]) -> None:
        """Take over what a training step's replicas recorded."""
        counts: dict[str, ResponseCounts] = {}
        for records in replicas:
            self._drafting |= bool(records.drafter_counters)
            rows = records.requests.to_pylist()
            for request_id, row in zip(records.request_ids, rows, strict=True):
                one = ResponseCounts(
                    row["drafted_tokens"],
                    row["accepted_tokens"],
                    row["verify_steps"],
                    row["end_s"] - row["start_s"],
                )
                counts[request_id] = counts.get(request_id, ResponseCounts()).plus(one)
        self._steps = [*self._steps, counts][-KEPT_STEPS:]

    def metrics(self, batch: KVBatchMeta) -> dict[str, float]:
        """Return ``rollout/spec_accept_*`` of the batch trained on; nothing without a drafter.

        Responses whose records were lost are left out of them.
        """
        self._by_key = {}
        if not (self._drafting or self._dumped):
            return {}  # nobody asks: spare fetching the batch
        extra_fields = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["extra_fields"]
        )["extra_fields"]
        counts = [self._find(getattr(fields, "data", fields)) for fields in extra_fields]
        self._by_key = dict(zip(batch.keys, counts, strict=True))
        if not self._drafting:
            return {}
        trained = [
            one
            for one, tag in zip(counts, batch.tags, strict=True)
            if one is not None and not tag.get("is_padding", False)
        ]
        return compute_spec_decode_metrics(
            [one.drafted_tokens for one in trained],
            [one.accepted_tokens for one in trained],
            [one.verify_steps for one in trained],
        )

    @property
    def counts(self) -> Mapping[str, ResponseCounts | None]:
        """What is known of the batch that ``metrics`` was asked for, by key of its rows."""
        return self._by_key

    def columns(self, keys: Sequence[str]) -> dict[str, list[Any]]:
        """Columns for a dump of the batch that ``metrics`` was asked for, by key of its rows.

        None where nothing is known of a response: its records were lost.
        """
        rows = [self._by_key.get(key) for key in keys]
        return {
            name: [None if row is None else getattr(row, field) for row in rows]
            for name, field in DUMPED.items()
        }

    def _find(self, extra_fields: dict[str, Any]) -> ResponseCounts | None:
        request_id = extra_fields.get(REQUEST_ID_FIELD)
        for step in reversed(self._steps):
            if request_id in step:
                return step[request_id]
        return None
