"""A session's record of its steps and requests, and what the record itself costs."""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Container, Sequence
from typing import Any

import numpy as np

from sam_rollout.gating import EngineStep
from sam_rollout.limits import Limits
from sam_rollout.session.ledger import RequestLedger
from sam_rollout.session.step_log import StepLog

logger = logging.getLogger(__name__)


class Bookkeeping:
    """Books every engine step; notes on steps that fail end alone, the ledger goes on.

    Args:
        limits: of the engine.
        sources: names of the drafter's sources.
        sampler_us: host time in the samplers since the last call.
        record: whether steps are noted and `drain` is called.

    Attributes:
        failures: of notes on engine steps.
        ledger: totals by request and by length of context.
    """

    def __init__(
        self, limits: Limits, sources: Sequence[str], sampler_us: Callable[[], float], record: bool
    ) -> None:
        self.failures = 0
        self.ledger = RequestLedger(limits, len(sources))
        self._log = StepLog(limits.k, sources)
        self._sampler_us = sampler_us
        self._record = record
        self._spent_ns = 0  # on the ledger in the step under way

    def follow(self, request_ids: list[str], live: Container[str]) -> list[str]:
        """Follow a changed batch; return the requests that have ended."""
        started_ns = time.perf_counter_ns()
        ended = self.ledger.follow(request_ids, live)
        if not self._record:
            self.ledger.drain()  # nobody will: keep totals of ended requests from piling up
        self._spent_ns += time.perf_counter_ns() - started_ns
        return ended

    def book(self, step: EngineStep, *, drafted: bool) -> None:
        """Add up what became of a step's drafts; `drafted`: anything was to be verified."""
        started_ns = time.perf_counter_ns()
        self.ledger.book(step.verified, step.num_tokens, drafted=drafted)
        self._spent_ns += time.perf_counter_ns() - started_ns

    def end(self, started_ns: int, offered: np.ndarray | None, budget: int) -> None:
        """End the session's part of a step, which began at `started_ns`.

        Args:
            started_ns: of `time.perf_counter_ns`.
            offered: bool[B], rows that may draft; None for none.
            budget: draft tokens.
        """
        records_from_ns = time.perf_counter_ns() - self._spent_ns
        self.ledger.offer(offered)
        if self._record and not self.failures:
            try:
                self._log.add(
                    started_ns, records_from_ns, budget, self.ledger.step, self._sampler_us()
                )
            except Exception:
                self.failures += 1
                self._log.clear()  # no half of a note is handed over
                logger.warning(
                    "Engine steps cannot be recorded any more and count as without drafts; "
                    "drafting goes on.",
                    exc_info=True,
                )
        self._spent_ns = 0

    def end_training_step(self) -> None:
        """What was spent since the last engine step is part of none."""
        self._spent_ns = 0

    def drain(self) -> dict[str, Any]:
        """See `DraftSession.drain`; `counters` are those of the ledger."""
        return {
            "steps": self._log.drain(),
            "clock_s": time.monotonic(),
            "host": platform.node(),
            "requests": {name: tuple(one) for name, one in self.ledger.drain().items()},
            "counters": self.ledger.take_counters(),
        }
