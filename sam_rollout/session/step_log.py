"""The session's half of every engine step's record, between two drains."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from sam_rollout.session.ledger import BY_PLACE, KEPT, REQUESTS, TOKENS
from sam_rollout.sources import NAMES
from sam_rollout.telemetry.records import NOTE_COLUMNS


class StepLog:
    """Collects a note per engine step, as cheap as a tuple.

    Args:
        k: Most draft tokens of a request.
        sources: Names of the drafter's sources, in the order of the ledger's sums.
    """

    def __init__(self, k: int, sources: Sequence[str]) -> None:
        self._k = k
        self._places = [NAMES.index(name) for name in sources]
        self._notes: list[tuple[Any, ...]] = []

    def add(
        self,
        started_ns: int,
        telemetry_from_ns: int,
        draft_budget: int,
        sums: np.ndarray,
        sampler_us: float,
    ) -> None:
        """Note a step that ends now.

        Args:
            started_ns: When the session was called, ``time.perf_counter_ns``.
            telemetry_from_ns: Of that clock: what passed since was spent on records.
            draft_budget: How far it drafts; 0 with the gate closed.
            sums: ``RequestLedger.step``: what was verified before, in the same engine step.
            sampler_us: Time in the samplers since the step before.
        """
        time_s, verified = time.monotonic(), sums.tobytes()
        now_ns = time.perf_counter_ns()
        drafter_us, telemetry_us = (now_ns - started_ns) / 1000, (now_ns - telemetry_from_ns) / 1000
        self._notes.append(
            (time_s, draft_budget > 0, draft_budget, drafter_us, sampler_us, telemetry_us, verified)
        )

    def clear(self) -> None:
        """Forget all notes."""
        self._notes = []

    def drain(self) -> dict[str, list[Any]]:
        """Return the columns of ``DraftNote``, and when each note was taken; then start anew.

        ``noted_s`` is ``CLOCK_MONOTONIC``, comparable across the processes of a host.
        """
        notes, self._notes = self._notes, []
        if not notes:
            return {name: [] for name in ("noted_s", *NOTE_COLUMNS)}
        noted_s, gate_open, budget, drafter_us, sampler_us, telemetry_us, verified = zip(
            *notes, strict=True
        )
        sums = np.frombuffer(b"".join(verified), np.int64).reshape(len(notes), -1)
        by_source = np.zeros((2, len(notes), len(NAMES)), np.int64)
        width = len(self._places)
        for kind in range(2):
            first = BY_PLACE + self._k + kind * width
            by_source[kind][:, self._places] = sums[:, first : first + width]
        drafted = sums[:, REQUESTS] > 0
        columns = {
            "gate_open": gate_open,
            "draft_budget": budget,
            "drafter_us": drafter_us,
            "sampler_us": sampler_us,
            "telemetry_us": telemetry_us,
            "draft_requests": sums[:, REQUESTS].tolist(),
            "draft_tokens": sums[:, TOKENS].tolist(),
            "accepted_tokens": sums[:, KEPT].tolist(),
            "accepted_per_position": _lists(sums[:, BY_PLACE : BY_PLACE + self._k], drafted),
            "drafted_per_source": _lists(by_source[0], drafted),
            "accepted_per_source": _lists(by_source[1], drafted),
        }
        return {"noted_s": list(noted_s), **{name: list(columns[name]) for name in NOTE_COLUMNS}}


def _lists(table: np.ndarray, drafted: np.ndarray) -> list[list[int]]:
    """A list per step; an empty one where the step verified no draft."""
    both = zip(table.tolist(), drafted.tolist(), strict=True)
    return [row if known else [] for row, known in both]
