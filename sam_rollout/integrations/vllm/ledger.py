"""Drafted and accepted tokens of every request, kept without a loop over the batch.

vLLM reports acceptance summed over a step; users want it per response. While the batch is unchanged
a step costs a few vector additions; totals by request id are touched only when it changes.

Tokens that only fill a step up (``padding.py``) are no drafts. What follows a draft is filling, so
of a row's accepted tokens its drafts come first. A filling token that the model happened to sample
is a token gained like any other, but not an accepted draft.
"""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import numpy as np

VERIFY_STEPS, DRAFTED, ACCEPTED = range(3)
DRAFTS, FILLING = range(2)
Totals = tuple[int, int, int]


class VerifiedPadding(NamedTuple):
    """What of a step's verification was filling; vLLM's statistics count it as drafts."""

    requests: int = 0  # that had nothing but filling
    tokens: int = 0
    accepted: tuple[int, ...] = ()  # by position


class RequestLedger:
    """Running totals (verify steps, drafted tokens, accepted tokens) per request.

    Args:
        max_rows: The engine's ``max_num_seqs``.
    """

    def __init__(self, max_rows: int) -> None:
        self.padding_tokens = 0  # verified, of all requests
        self.accepted_padding_tokens = 0
        self._ids: list[str] = []
        self._counts = np.zeros((3, max_rows), dtype=np.int64)
        self._in_flight = np.zeros((2, max_rows), dtype=np.int64)
        self._parked: dict[str, np.ndarray] = {}
        self._finished: dict[str, Totals] = {}

    def follow(self, request_ids: list[str], live: Container[str]) -> list[str]:
        """Re-align rows with a changed batch; drafts in flight follow their request.

        Args:
            request_ids: The new batch, row by row.
            live: Requests the engine still knows, whether in the batch or not.

        Returns:
            Requests that ended since the last call; their totals wait for ``drain``.
        """
        in_flight = dict(zip(self._ids, self._in_flight.T.copy(), strict=False))
        for row, request_id in enumerate(self._ids):
            self._parked[request_id] = self._counts[:, row].copy()
        ended = [request_id for request_id in self._parked if request_id not in live]
        for request_id in ended:
            self._finished[request_id] = tuple(self._parked.pop(request_id).tolist())
        self._counts[:] = 0
        self._in_flight[:] = 0
        for row, request_id in enumerate(request_ids):
            self._counts[:, row] = self._parked.pop(request_id, 0)
            self._in_flight[:, row] = in_flight.get(request_id, 0)
        self._ids = list(request_ids)
        return ended

    def in_flight(self, rows: int) -> np.ndarray:
        """What the last step was given, int [2, batch]: drafts and what filled them up."""
        return self._in_flight[:, :rows]

    def observe(self, sampled: np.ndarray) -> VerifiedPadding:
        """Book the step's outcome: ``sampled`` int32 [batch] tokens per row, bonus included."""
        rows = len(sampled)
        drafts, filling = self._in_flight[:, :rows]
        # A row that sampled nothing was not scheduled to completion; its draft was not verified.
        complete = sampled > 0
        verified = (drafts > 0) & complete
        self._counts[VERIFY_STEPS, :rows] += verified
        self._counts[DRAFTED, :rows] += np.where(verified, drafts, 0)
        self._counts[ACCEPTED, :rows] += np.where(verified, np.minimum(sampled - 1, drafts), 0)
        if not filling.any():
            return VerifiedPadding()
        return self._observe_padding(sampled - 1, drafts, np.where(complete, filling, 0))

    def _observe_padding(
        self, accepted: np.ndarray, drafts: np.ndarray, filling: np.ndarray
    ) -> VerifiedPadding:
        verified = filling > 0
        place = np.arange((drafts + filling).max(initial=0))[:, np.newaxis]
        is_filling = verified & (place >= drafts) & (place < drafts + filling)  # [places, batch]
        by_place = (is_filling & (place < accepted)).sum(axis=1).tolist()
        padding = VerifiedPadding(
            requests=int((verified & (drafts == 0)).sum()),
            tokens=int(filling.sum()),
            accepted=tuple(by_place),
        )
        self.padding_tokens += padding.tokens
        self.accepted_padding_tokens += sum(by_place)
        return padding

    def expect(self, draft_counts: np.ndarray, filling_counts: np.ndarray | int = 0) -> None:
        """Note what the next step was given: drafts and what fills them up, int [batch] each."""
        rows = len(draft_counts)
        self._in_flight[DRAFTS, :rows] = draft_counts
        self._in_flight[FILLING, :rows] = filling_counts

    def drain(self) -> dict[str, Totals]:
        """Return the totals of requests that ended since the last call, and of live ones."""
        report = self._finished
        self._finished = {}
        report.update({rid: tuple(counts.tolist()) for rid, counts in self._parked.items()})
        for row, request_id in enumerate(self._ids):
            report[request_id] = tuple(self._counts[:, row].tolist())
        return report
