"""Records a session's steps and requests."""

import platform
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from sam_rollout.core.limits import Limits
from sam_rollout.session.ledger import BY_PLACE, FILLING, KEPT, REQUESTS, TOKENS, RequestLedger
from sam_rollout.sources import NAMES

# The first items of a note; the ledger's sums follow.
_NOTED = ("noted_s", "gate_open", "draft_budget", "draft_trees", "drafter_us")


class Bookkeeping:
    """Records every engine step, unless `record` is false; then `drain` need not be called."""

    def __init__(self, limits: Limits, sources: Sequence[str], record: bool) -> None:
        self.ledger = RequestLedger(limits, len(sources))
        self._k = limits.k
        self._places = [NAMES.index(name) for name in sources]
        self._notes: list[tuple[Any, ...]] = []
        self._record = record

    def end(
        self, started_ns: int, offered: np.ndarray | None, budget: int, *, branches: bool = False
    ) -> None:
        """Record a step after its drafts were made.

        `started_ns` is the time at which the session began to work on the step. `offered`, bool[B],
        marks the requests that may draft; None marks no request. `branches` says whether drafts may
        be trees.
        """
        self.ledger.offer(offered)
        if self._record:
            time_s, sums = time.monotonic(), self.ledger.step.tobytes()
            drafter_us = (time.perf_counter_ns() - started_ns) / 1000
            is_open = budget > 0
            self._notes.append(  # a tuple is the cheapest form of a note
                (time_s, is_open, budget, branches and is_open, drafter_us, sums)
            )

    def drain(self) -> dict[str, Any]:
        """Return the record and begin a new one; `DraftSession.drain` adds further counters."""
        notes, self._notes = self._notes, []
        sums = np.frombuffer(b"".join(note[-1] for note in notes), np.int64)
        sums = sums.reshape(len(notes), len(self.ledger.step))
        filling, kept_filling = sums[:, FILLING:BY_PLACE].sum(axis=0).tolist()
        return {
            "steps": self._columns(notes, sums),
            "clock_s": time.monotonic(),
            "host": platform.node(),
            "requests": {name: tuple(one) for name, one in self.ledger.drain().items()},
            "counters": {
                "draft/padding_tokens": filling,
                "draft/accepted_padding_tokens": kept_filling,
            },
        }

    def _columns(self, notes: list[tuple[Any, ...]], sums: np.ndarray) -> dict[str, list[Any]]:
        """Return the columns of `DraftNote`, and the steps' times (CLOCK_MONOTONIC)."""
        by_source = np.zeros((len(notes), 2, len(NAMES)), np.int64)
        last = sums[:, BY_PLACE + self._k :]
        by_source[:, :, self._places] = last.reshape(len(notes), 2, len(self._places))
        drafted = sums[:, REQUESTS] > 0
        return {
            **{name: [note[place] for note in notes] for place, name in enumerate(_NOTED)},
            "draft_requests": sums[:, REQUESTS].tolist(),
            "draft_tokens": sums[:, TOKENS].tolist(),
            "accepted_tokens": sums[:, KEPT].tolist(),
            "accepted_per_position": _lists(sums[:, BY_PLACE : BY_PLACE + self._k], drafted),
            "drafted_per_source": _lists(by_source[:, 0], drafted),
            "accepted_per_source": _lists(by_source[:, 1], drafted),
        }


def _lists(table: np.ndarray, drafted: np.ndarray) -> list[list[int]]:
    """Return a table's rows as lists, one per step; a step without drafts gets an empty list."""
    both = zip(table.tolist(), drafted.tolist(), strict=True)
    return [row if known else [] for row, known in both]
