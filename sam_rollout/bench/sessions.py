"""Defines the interface of drafters in a replay, and our own drafter, which implements it."""

import dataclasses
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from sam_rollout.config import SamConfig, TextsConfig
from sam_rollout.core.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.core.limits import Limits
from sam_rollout.core.traces import Int32Array, Trace
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.gating import EngineStep
from sam_rollout.gating.auto import AutoGate
from sam_rollout.session.adapter import NO_HOOKS, EngineHooks
from sam_rollout.session.session import DraftSession
from sam_rollout.sources.contract import Piece


class Session:
    """A drafter for batches of requests."""

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Add a new request, before the first call of `propose` that includes it."""

    def propose(
        self,
        request_ids: list[str],
        token_ids: Int32Array,
        lengths: Int32Array,
        sampled: list[list[int]],
    ) -> list[list[int]]:
        """Read the new tokens, and draft.

        Args:
            request_ids: The B requests in order of rows.
            token_ids: int32 [R >= B, L]; row i begins with the text of request i.
            lengths: int32 [B], number of known tokens of each row.
            sampled: Each row's tokens since the last call, at least one.

        Returns:
            The draft of each row.
        """
        raise NotImplementedError

    def parents(self, row: int) -> Sequence[int] | None:
        """Return the parents of a row's draft tokens (`DraftBatch.parents`); None for a chain."""
        return None

    def finish(self, request_ids: Iterable[str]) -> None:
        """Remove requests that have ended."""

    def end_step(self) -> None:
        """End a training step, after all its requests have ended."""


class _Requests(dict[str, RequestIdentity]):
    @property
    def live(self) -> Collection[str]:
        return self

    def identity(self, request_id: str) -> RequestIdentity:
        return self[request_id]

    def takes(self, request_id: str, shape: str) -> bool:
        return True


class _ClockedGate(AutoGate):
    def __init__(self, now_s: Callable[[], float], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._now_s = now_s

    def observe(self, step: EngineStep) -> None:
        super().observe(step._replace(now_ns=round(1e9 * self._now_s())))


class OwnSession(Session):
    """Our drafter, with a temporary folder for ended responses.

    Args:
        config: The settings; their folder of texts is replaced by the temporary one.
        max_rows: Maximum number of requests at once.
        max_length: Length of the longest text, in tokens.
        now_s: A simulated clock for the gate `auto`, in seconds; None means the machine's clock.
        hooks: Functions of the engine that the session calls.
        record: Whether the session keeps records. Without records, a training step also ends when
            a batch shares no request with the batch before.
    """

    def __init__(
        self,
        config: SamConfig,
        max_rows: int,
        max_length: int,
        now_s: Callable[[], float] | None = None,
        hooks: EngineHooks = NO_HOOKS,
        *,
        record: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        config = dataclasses.replace(config, texts=TextsConfig(path=self._folder.name))
        self.requests = _Requests()
        limits = Limits(max_rows, max_length, k=config.max_draft_tokens)
        self._session = DraftSession(config, self.requests, limits, record=record, hooks=hooks)
        if now_s is not None and config.gate.kind == "auto":
            shapes = len(self._session.drafter.shapes) if self._session.drafter else 1
            self._session.gate = _ClockedGate(now_s, limits, config.gate.exploration, shapes)
        self.took_s = 0.0  # CPU time of the last step, in this thread

    def admit(self, request_id: str, trace: Trace, step: int) -> None:
        """Add the request with its group and sibling number."""
        self.requests[request_id] = RequestIdentity(
            trace.group, trace.sibling, step, TRAIN_SPLIT, key=0
        )

    def step(
        self,
        request_ids: list[str],
        token_ids: Int32Array,
        lengths: Int32Array,
        gained: Int32Array,
        *,
        room: bool = True,
    ) -> DraftBatch:
        """Run a step of the session; `DraftSession.step` explains arguments and result."""
        begun_s = time.thread_time()
        self._batch = self._session.step(request_ids, token_ids, lengths, gained, room=room)
        self.took_s = time.thread_time() - begun_s
        self._wait()
        return self._batch

    def propose(self, request_ids, token_ids, lengths, sampled) -> list[list[int]]:
        """Run a step of the session, and return the drafts as lists."""
        gained = np.fromiter(map(len, sampled), np.int32, len(sampled))
        return self.step(request_ids, token_ids, lengths, gained).to_lists()

    def parents(self, row: int) -> Sequence[int] | None:
        """Return the parents of a row's draft tokens in the last step; None for a chain."""
        return self._batch.parents[row].tolist() if self._batch.has_trees else None

    def finish(self, request_ids: Iterable[str]) -> None:
        """Remove requests; the session notices in its next step that they are missing."""
        for request_id in request_ids:
            self.requests.pop(request_id, None)

    def exchange(self, name: str, pieces: Sequence[Piece]) -> list[Piece]:
        """Read other engines' pieces of text; return new pieces of this engine.

        `name` is this engine's name.
        """
        return self._session.exchange_texts(name, pieces)

    def end_step(self) -> None:
        """End the training step in the session, and drop its records."""
        self._session.drain()
        self._wait()

    def _wait(self) -> None:
        """Wait for the drafter's background work.

        Raises:
            RuntimeError: The drafter has failed, and would draft nothing.
        """
        if self._session.drafter is None:
            raise RuntimeError("the drafter failed; the log says why")
        self._session.drafter.wait()
