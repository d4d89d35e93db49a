"""Counts drafted and accepted tokens per request and per step.

Padding tokens (``padding.py``) are not counted as draft tokens. They follow a request's draft
tokens, so accepted draft tokens come before accepted padding tokens.
"""

from collections.abc import Container

import numpy as np
from numba import types

from sam_rollout.automaton.compilation import GIVEN_INT32, INT32, INT64_2D, kernel, warm_up, written
from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import Verified
from sam_rollout.telemetry.records import RequestTotals

VERIFY_STEPS, DRAFTED, ACCEPTED, OPEN_STEPS, OPEN_TOKENS = range(5)
# These are the indices of a step's sums: requests with drafts, draft tokens, accepted draft tokens,
# padding tokens, accepted padding tokens. From BY_PLACE on there are accepted tokens by position in
# the draft [k], draft tokens by source, and accepted tokens by source.
REQUESTS, TOKENS, KEPT, FILLING, KEPT_FILLING, BY_PLACE = range(6)


class RequestLedger:
    """Keeps totals per request.

    Attributes:
        step: int64 [5 + k + 2 * sources], the sums of the step that was added last. Their indices
            are ``REQUESTS`` to ``BY_PLACE``.
    """

    def __init__(self, limits: Limits, sources: int) -> None:
        warm_up(_book)
        self.step = np.zeros(BY_PLACE + limits.k + 2 * sources, np.int64)
        self._k, max_rows = limits.k, limits.max_rows
        self._ids: list[str] = []
        self._counts = np.zeros((len(RequestTotals._fields), max_rows), dtype=np.int64)
        self._offered = np.zeros(max_rows, dtype=np.int32)
        self._anything_offered = False
        self._parked: dict[str, np.ndarray] = {}
        self._finished: dict[str, RequestTotals] = {}

    def follow(self, request_ids: list[str], live: Container[str]) -> list[str]:
        """Register a changed batch; return the requests that ended since the last call.

        `live` holds all requests that have not ended, also those outside the batch.
        """
        row_of = {request_id: row for row, request_id in enumerate(self._ids)}
        count = len(request_ids)
        rows = np.fromiter((row_of.pop(rid, -1) for rid in request_ids), np.int64, count)
        for request_id, row in row_of.items():  # these requests have left the batch
            self._parked[request_id] = self._counts[:, row].copy()
        stayed = rows >= 0
        self._counts[:, :count] = np.where(stayed, self._counts[:, rows], 0)
        self._counts[:, count:] = 0
        self._offered[:count] = np.where(stayed, self._offered[rows], 0)
        for row in np.flatnonzero(~stayed):
            self._counts[:, row] = self._parked.pop(request_ids[row], 0)
        ended = [request_id for request_id in self._parked if request_id not in live]
        for request_id in ended:
            self._finished[request_id] = RequestTotals(*self._parked.pop(request_id).tolist())
        self._ids = list(request_ids)
        return ended

    def book(self, verified: Verified, *, drafted: bool) -> None:
        """Add a step to the totals; `drafted` says if it verified draft or padding tokens."""
        if not (drafted or self._anything_offered):
            self.step.fill(0)
            return
        _book(
            verified.sampled, verified.drafted, verified.accepted, verified.filling,
            verified.source, self._offered, self._k, self._counts, self.step,
        )  # fmt: skip

    def offer(self, rows: np.ndarray | None) -> None:
        """Say which requests may draft in the next step, as bool [batch]; None means no request."""
        if rows is not None:
            self._offered[: len(rows)] = rows
        elif self._anything_offered:
            self._offered.fill(0)
        self._anything_offered = rows is not None

    def drain(self) -> dict[str, RequestTotals]:
        """Return the totals of requests that ended since the last call, and of live requests."""
        ended, self._finished = self._finished, {}
        live = self._parked | {name: self._counts[:, row] for row, name in enumerate(self._ids)}
        return ended | {name: RequestTotals(*counts.tolist()) for name, counts in live.items()}


@kernel(GIVEN_INT32, *[INT32] * 5, types.int64, INT64_2D, written(types.int64))
def _book(sampled, drafted, accepted, filling, source, offered, k, counts, step):
    sources = (step.size - BY_PLACE - k) // 2
    step[:] = 0
    for row in range(sampled.size):
        gained = sampled[row]
        if gained == 0:
            continue
        if offered[row]:
            counts[OPEN_STEPS, row] += 1
            counts[OPEN_TOKENS, row] += gained
        if drafted[row] > 0:
            counts[VERIFY_STEPS, row] += 1
            counts[DRAFTED, row] += drafted[row]
            counts[ACCEPTED, row] += accepted[row]
            step[REQUESTS] += 1
            step[TOKENS] += drafted[row]
            step[KEPT] += accepted[row]
            for place in range(accepted[row]):
                step[BY_PLACE + place] += 1
            step[BY_PLACE + k + source[row]] += drafted[row]
            step[BY_PLACE + k + sources + source[row]] += accepted[row]
        if filling[row] > 0:
            step[FILLING] += filling[row]
            step[KEPT_FILLING] += gained - 1 - accepted[row]
