"""Drafted and accepted tokens of every request, kept without a Python loop over the batch.

vLLM reports acceptance summed over a step; users want it per response, and by the length of the
text. A step with drafts costs one compiled call, a step without drafts next to nothing; totals by
request id are touched only when the batch changes.

Tokens that only fill a step up (``padding.py``) are no drafts. What follows a draft is filling, so
of a row's accepted tokens its drafts come first. A filling token that the model happened to sample
is a token gained like any other, but not an accepted draft.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np
from numba import njit, types

from sam_rollout.automaton.compilation import WarmUp, compile_kernels
from sam_rollout.config import MAX_DRAFT_TOKENS
from sam_rollout.telemetry.schema import CONTEXT_COUNTERS, CONTEXT_EDGES, CONTEXT_KINDS

VERIFY_STEPS, DRAFTED, ACCEPTED, OPEN_STEPS, OPEN_TOKENS = range(5)
DRAFTS, FILLING, OFFERED = range(3)


class RequestTotals(NamedTuple):
    """What became of a request's drafts."""

    verify_steps: int
    drafted_tokens: int
    accepted_tokens: int
    open_steps: int  # that the gate let the drafter draft for, whether it found a draft or not
    open_tokens: int  # gained in them


class VerifiedPadding(NamedTuple):
    """What of a step's verification was filling; vLLM's statistics count it as drafts."""

    requests: int = 0  # that had nothing but filling
    tokens: int = 0
    accepted: tuple[int, ...] = ()  # by position


NO_PADDING = VerifiedPadding()


class RequestLedger:
    """Running totals per request, and over all requests by length of context.

    Args:
        max_rows: The engine's ``max_num_seqs``.
    """

    def __init__(self, max_rows: int) -> None:
        warm_up()
        self.padding_tokens = 0  # verified, of all requests
        self.accepted_padding_tokens = 0
        self._ids: list[str] = []
        self._counts = np.zeros((len(RequestTotals._fields), max_rows), dtype=np.int64)
        self._in_flight = np.zeros((3, max_rows), dtype=np.int32)
        self._pending = False  # whether anything in flight is above 0
        self._edges = np.array(CONTEXT_EDGES, np.int32)
        self._by_context = np.zeros((len(CONTEXT_KINDS), len(CONTEXT_EDGES)), np.int64)
        self._filling_by_place = np.zeros(MAX_DRAFT_TOKENS, np.int64)
        self._parked: dict[str, np.ndarray] = {}
        self._finished: dict[str, RequestTotals] = {}

    def follow(self, request_ids: list[str], live: Container[str]) -> list[str]:
        """Re-align rows with a changed batch; drafts in flight follow their request.

        Args:
            request_ids: The new batch, row by row.
            live: Requests the engine still knows, whether in the batch or not.

        Returns:
            Requests that ended since the last call; their totals wait for ``drain``.
        """
        row_of = {request_id: row for row, request_id in enumerate(self._ids)}
        count = len(request_ids)
        rows = np.fromiter((row_of.pop(rid, -1) for rid in request_ids), np.int64, count)
        for request_id, row in row_of.items():  # what is left has left the batch
            self._parked[request_id] = self._counts[:, row].copy()
        stayed = rows >= 0
        for table in (self._counts, self._in_flight):
            moved = np.where(stayed, table[:, rows], 0)
            table[:, :count] = moved
            table[:, count:] = 0
        for row in np.flatnonzero(~stayed):
            self._counts[:, row] = self._parked.pop(request_ids[row], 0)
        ended = [request_id for request_id in self._parked if request_id not in live]
        for request_id in ended:
            self._finished[request_id] = RequestTotals(*self._parked.pop(request_id).tolist())
        self._ids = list(request_ids)
        return ended

    def in_flight(self, rows: int) -> np.ndarray:
        """What the last step was given, int32 [2, batch]: drafts and what filled them up."""
        return self._in_flight[: FILLING + 1, :rows]

    def observe(self, sampled: np.ndarray, num_tokens: np.ndarray) -> VerifiedPadding:
        """Book the step's outcome.

        Args:
            sampled: int32 [batch], tokens each row gained, bonus included; 0 where a row was not
                scheduled to completion, so that its draft was not verified.
            num_tokens: int32 [batch], length of each text with these tokens.
        """
        if not self._pending:
            return NO_PADDING
        requests, tokens, places = _observe(
            sampled, num_tokens, self._in_flight, self._counts, self._edges, self._by_context,
            self._filling_by_place,
        )  # fmt: skip
        if not tokens:
            return NO_PADDING
        by_place = self._filling_by_place[:places]
        padding = VerifiedPadding(requests, tokens, tuple(by_place.tolist()))
        by_place[:] = 0
        self.padding_tokens += tokens
        self.accepted_padding_tokens += sum(padding.accepted)
        return padding

    def expect(
        self,
        draft_counts: np.ndarray,
        filling_counts: np.ndarray | int = 0,
        offered: np.ndarray | bool = False,
    ) -> None:
        """Note what the next step was given.

        Args:
            draft_counts, filling_counts: Drafts and what fills them up, int [batch] each.
            offered: Rows that the gate let the drafter draft for, bool [batch].
        """
        rows = len(draft_counts)
        self._in_flight[DRAFTS, :rows] = draft_counts
        self._in_flight[FILLING, :rows] = filling_counts
        self._in_flight[OFFERED, :rows] = offered
        self._pending = True

    def expect_nothing(self) -> None:
        """Note that the next step has neither drafts nor filling, and the gate is closed."""
        if self._pending:
            self._in_flight.fill(0)
            self._pending = False

    def counters(self) -> dict[str, int]:
        """Verified drafts by length of context so far; lengths without any are left out."""
        values = zip(CONTEXT_COUNTERS, self._by_context.ravel().tolist(), strict=True)
        seen = self._by_context[0] > 0
        occurs = np.tile(seen, len(CONTEXT_KINDS)).tolist()
        return {name: value for (name, value), known in zip(values, occurs, strict=True) if known}

    def drain(self) -> dict[str, RequestTotals]:
        """Return the totals of requests that ended since the last call, and of live ones."""
        report = self._finished
        self._finished = {}
        for request_id, counts in self._parked.items():
            report[request_id] = RequestTotals(*counts.tolist())
        for row, request_id in enumerate(self._ids):
            report[request_id] = RequestTotals(*self._counts[:, row].tolist())
        return report


@njit(nogil=True)
def _observe(sampled, num_tokens, in_flight, counts, edges, by_context, filling_by_place):
    padded_requests = padding = places = 0
    for row in range(sampled.size):
        gained = sampled[row]
        if gained == 0:
            continue
        drafts, filling = in_flight[DRAFTS, row], in_flight[FILLING, row]
        if in_flight[OFFERED, row]:
            counts[OPEN_STEPS, row] += 1
            counts[OPEN_TOKENS, row] += gained
        if drafts > 0:
            accepted = min(gained - 1, drafts)
            counts[VERIFY_STEPS, row] += 1
            counts[DRAFTED, row] += drafts
            counts[ACCEPTED, row] += accepted
            context = num_tokens[row] - gained
            bin_ = edges.size - 1
            while bin_ > 0 and context < edges[bin_]:
                bin_ -= 1
            by_context[0, bin_] += 1
            by_context[1, bin_] += drafts
            by_context[2, bin_] += accepted
        if filling > 0:
            if drafts == 0:
                padded_requests += 1
            padding += filling
            places = max(places, drafts + filling)
            for place in range(drafts, min(drafts + filling, gained - 1)):
                filling_by_place[place] += 1
    return padded_requests, padding, places


_INPUT = types.Array(types.int32, 1, "A", readonly=True)
_INT64_TABLE = types.Array(types.int64, 2, "C")
_SIGNATURES = (
    (
        _observe,
        (
            _INPUT, _INPUT, types.Array(types.int32, 2, "C"), _INT64_TABLE,
            types.Array(types.int32, 1, "C"), _INT64_TABLE, types.Array(types.int64, 1, "C"),
        ),
    ),
)  # fmt: skip


def warm_up() -> WarmUp:
    """Compile what this module runs in every step, as `automaton.kernels.warm_up` does."""
    return compile_kernels(_SIGNATURES)
