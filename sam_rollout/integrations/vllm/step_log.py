"""The drafter's side of every engine step between two drains, as cheap as lists."""

from __future__ import annotations

import time

import numpy as np

from sam_rollout.integrations.vllm.ledger import VerifiedPadding
from sam_rollout.telemetry.records import SOURCES


class StepLog:
    """Collects a note per engine step.

    Args:
        sources: Names of the drafter's sources, in the order of its totals.
    """

    def __init__(self, sources: list[str]) -> None:
        self._columns_of_sources = [SOURCES.index(name) for name in sources]
        self._totals_before = np.zeros((len(sources), 2), np.int64)
        self._clear()

    def _clear(self) -> None:
        self._time_s: list[float] = []
        self._drafter_us: list[float] = []
        self._gate_open: list[bool] = []
        self._draft_budget: list[int] = []
        self._padding: list[VerifiedPadding] = []
        self._totals: list[bytes] = []
        self._sampler_us: list[float] = []
        self._telemetry_us: list[float] = []

    def add(
        self,
        started_ns: int,
        booking_ns: int,
        gate_open: bool,
        draft_budget: int,
        padding: VerifiedPadding,
        totals: np.ndarray,
        sampler_us: float,
    ) -> None:
        """Note a step that ends now.

        Args:
            started_ns: When its drafter was called, ``time.perf_counter_ns``.
            booking_ns: Of that clock: what passed since was spent on records.
            gate_open, draft_budget: Whether and how far it drafts.
            padding: What was verified before the drafter was called, in the same engine step.
            totals: int64 [sources, 2], draft tokens verified and accepted since the start.
            sampler_us: Time in the samplers since the step before.
        """
        self._time_s.append(time.monotonic())
        self._gate_open.append(gate_open)
        self._draft_budget.append(draft_budget)
        self._padding.append(padding)
        self._totals.append(totals.tobytes())
        self._sampler_us.append(sampler_us)
        now_ns = time.perf_counter_ns()
        self._drafter_us.append((now_ns - started_ns) / 1000)
        self._telemetry_us.append((now_ns - booking_ns) / 1000)

    def drain(self) -> dict[str, list]:
        """Return the columns and start anew.

        ``time_s`` is ``CLOCK_MONOTONIC``, comparable across the processes of a host. The columns
        per source are of the step's verification; steps that verified no draft have empty ones.
        """
        drafted, accepted = self._per_source()
        columns = {
            "time_s": self._time_s,
            "gate_open": self._gate_open,
            "drafter_us": self._drafter_us,
            "padding": self._padding,
            "draft_budget": self._draft_budget,
            "drafted_per_source": drafted,
            "accepted_per_source": accepted,
            "sampler_us": self._sampler_us,
            "telemetry_us": self._telemetry_us,
        }
        self._clear()
        return columns

    def _per_source(self) -> tuple[list[list[int]], list[list[int]]]:
        """What each step added to the totals, in the order of ``SOURCES``."""
        shape = (len(self._totals), len(self._columns_of_sources), 2)
        totals = np.frombuffer(b"".join(self._totals), np.int64).reshape(shape)
        added = np.zeros((len(totals), len(SOURCES), 2), np.int64)
        added[:, self._columns_of_sources] = np.diff(
            totals, axis=0, prepend=self._totals_before[np.newaxis]
        )
        if len(totals):
            self._totals_before = totals[-1]
        verified = added[:, :, 0].any(axis=1).tolist()
        return tuple(
            [
                row if known else []
                for row, known in zip(added[:, :, kind].tolist(), verified, strict=True)
            ]
            for kind in range(2)
        )
