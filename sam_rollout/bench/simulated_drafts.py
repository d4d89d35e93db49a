"""The drafter and the gate of `sam=on` in a simulated engine, with its simulated clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sam_rollout.bench.replayed_requests import ReplayedRequests
from sam_rollout.config import SamConfig
from sam_rollout.core.limits import Limits
from sam_rollout.gating import EngineStep, Gate, GuardedGate
from sam_rollout.gating.auto import AutoGate
from sam_rollout.session.session import DraftSession
from sam_rollout.sources.contract import Piece
from sam_rollout.telemetry.traces import Trace


class Drafts:
    """The drafting of one simulated engine.

    Args:
        folder: Folder of ended responses.
        name: Name of the engine.
        max_rows: Most requests that run at once.
        max_length: Length of the longest text, tokens.
        now_s: The engine's clock, in seconds.

    Attributes:
        k: Most draft tokens per request.
    """

    def __init__(
        self, folder: Path, name: str, max_rows: int, max_length: int, now_s: Callable[[], float]
    ) -> None:
        config = SamConfig.from_mapping(
            {"sources": {"run": {"when": "always"}}, "texts": {"path": str(folder)}}
        )
        self.k = config.max_draft_tokens
        self._name = name
        self._requests = ReplayedRequests()
        limits = Limits(max_rows, max_length + self.k + 1, k=self.k)
        self._session = DraftSession(config, self._requests, limits, record=False)
        gate = AutoGate(limits, config.gate.exploration)
        self._session.gate = GuardedGate(Timed(gate, now_s))

    def admit(self, request_id: str, trace: Trace) -> None:
        """Add a request before its first step."""
        self._requests.admit(request_id, trace, trace.step)

    def finish(self, request_id: str) -> None:
        """Remove a request that has ended."""
        del self._requests[request_id]

    def step(
        self, request_ids: list[str], token_ids: np.ndarray, known: np.ndarray, gained: np.ndarray
    ) -> tuple[list[list[int]], float]:
        """Draft for the next step; return the drafts, and the CPU seconds of this thread."""
        begun = time.thread_time()
        batch = self._session.step(request_ids, token_ids, known, gained)
        took = time.thread_time() - begun
        if self._session.drafter is None:
            raise RuntimeError("the drafter failed; the log says why")
        return batch.to_lists(), took

    def exchange(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Read pieces that other engines sampled; return this engine's new pieces."""
        return self._session.exchange_texts(self._name, pieces)

    def end_step(self) -> None:
        """End a training step."""
        self._session.end_step()
        if self._session.drafter is not None:
            self._session.drafter.wait()


class Timed:
    """A gate that reads a simulated clock instead of the machine's."""

    def __init__(self, gate: Gate, now_s: Callable[[], float]) -> None:
        self._gate, self._now_s = gate, now_s
        self.budget, self.drain = gate.budget, gate.drain

    @property
    def is_trial(self) -> bool:
        """Whether the gate makes a trial; see `Gate`."""
        return self._gate.is_trial

    @property
    def least_chance(self) -> float:
        """Return the wrapped gate's least chance."""
        return self._gate.least_chance

    @property
    def shape(self) -> int:
        """Return the wrapped gate's shape of drafts."""
        return self._gate.shape

    def observe(self, step: EngineStep) -> None:
        """Let the wrapped gate learn from a step at the simulated time."""
        self._gate.observe(step._replace(now_ns=round(1e9 * self._now_s())))
