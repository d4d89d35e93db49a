"""Drafted and accepted tokens of every request, kept without a loop over the batch.

vLLM reports acceptance summed over a step; users want it per response. While the batch is unchanged
a step costs a few vector additions; totals by request id are touched only when it changes.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

VERIFY_STEPS, DRAFTED, ACCEPTED = range(3)
Totals = tuple[int, int, int]


class RequestLedger:
    """Running totals (verify steps, drafted tokens, accepted tokens) per request.

    Args:
        max_rows: The engine's ``max_num_seqs``.
    """

    def __init__(self, max_rows: int) -> None:
        self._ids: list[str] = []
        self._counts = np.zeros((3, max_rows), dtype=np.int64)
        self._expected = np.zeros(max_rows, dtype=np.int64)
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
        expected = dict(zip(self._ids, self._expected.tolist(), strict=False))
        for row, request_id in enumerate(self._ids):
            self._parked[request_id] = self._counts[:, row].copy()
        ended = [request_id for request_id in self._parked if request_id not in live]
        for request_id in ended:
            self._finished[request_id] = tuple(self._parked.pop(request_id).tolist())
        self._counts[:] = 0
        self._expected[:] = 0
        for row, request_id in enumerate(request_ids):
            self._counts[:, row] = self._parked.pop(request_id, 0)
            self._expected[row] = expected.get(request_id, 0)
        self._ids = list(request_ids)
        return ended

    def observe(self, sampled: np.ndarray) -> None:
        """Book the step's outcome: ``sampled`` int32 [batch] tokens per row, bonus included."""
        rows = len(sampled)
        expected = self._expected[:rows]
        # A row that sampled nothing was not scheduled to completion; its draft was not verified.
        verified = (expected > 0) & (sampled > 0)
        self._counts[VERIFY_STEPS, :rows] += verified
        self._counts[DRAFTED, :rows] += np.where(verified, expected, 0)
        self._counts[ACCEPTED, :rows] += np.where(verified, sampled - 1, 0)

    def expect(self, draft_counts: np.ndarray) -> None:
        """Note the drafts handed out for the next step, int [batch]."""
        self._expected[: len(draft_counts)] = draft_counts

    def drain(self) -> dict[str, Totals]:
        """Return the totals of requests that ended since the last call, and of live ones."""
        report = self._finished
        self._finished = {}
        report.update({rid: tuple(counts.tolist()) for rid, counts in self._parked.items()})
        for row, request_id in enumerate(self._ids):
            report[request_id] = tuple(self._counts[:, row].tolist())
        return report
