"""Measures the time of drafters, which take turns and are called as in an engine."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import Any

import numpy as np

from sam_rollout.bench.sessions import Session
from sam_rollout.bench.sides import ARCTIC_4, FIRST, Side
from sam_rollout.telemetry.traces import Trace

K = 3
BLOCK = 10  # calls of a side in a row


@dataclasses.dataclass(frozen=True)
class CostSizes:
    """The sizes of the measurement; lengths in tokens."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (4_096, 32_768)
    steps: int = 100
    slow_tokens: int = 1_100_000  # most tokens of a batch for slow sides (`SLOW`)

    @property
    def longest(self) -> int:
        """Number of tokens that each text needs."""
        return max(self.contexts) + 4 * self.steps + 64


# Most tokens of a batch for the plain automaton. The slow sides take many times the time and the
# memory of the others.
PLAIN_PYTHON_TOKENS = 131_072
SLOW = (ARCTIC_4, FIRST)


class Batch:
    """A batch of requests that grow by two tokens per step on average.

    Args:
        texts: Siblings of one prompt. Further rows repeat them with other token ids, as groups that
            share no tokens with the first.
        rows: Number of requests.
        context: Tokens of each request at the beginning.
        steps: Number of steps.
    """

    def __init__(self, texts: list[Trace], rows: int, context: int, steps: int) -> None:
        vocabulary = 1 + max(int(text.tokens.max()) for text in texts)
        self.traces = [
            _regrouped(texts[row % len(texts)], row // len(texts), vocabulary)
            for row in range(rows)
        ]
        self.tokens = np.stack([trace.tokens[: context + 3 * steps] for trace in self.traces])
        self.ids = [f"request-{row}" for row in range(rows)]
        self.lengths = np.full(rows, context, np.int32)
        self._step = 0

    def start(self, session: Session) -> float:
        """Let a session read the first tokens; return the seconds it took."""
        for request_id, trace in zip(self.ids, self.traces, strict=True):
            session.admit(request_id, trace, 0)
        starts = np.array([len(trace.prompt) for trace in self.traces])
        return _wall_s(session, self.ids, self.tokens, self.lengths, self._between(starts))

    def grow(self) -> list[list[int]]:
        """Add one to three tokens to each row; return them."""
        before = self.lengths.copy()
        self.lengths += 1 + (np.arange(len(before), dtype=np.int32) + self._step) % 3
        self._step += 1
        return self._between(before)

    def _between(self, starts: np.ndarray) -> list[list[int]]:
        """Return each row's tokens from `starts` on."""
        rows = zip(self.tokens, starts, self.lengths, strict=True)
        return [row[start:stop].tolist() for row, start, stop in rows]


def joined(known: list[Trace], tokens: int, first: int = 0) -> Trace:
    """Join responses to one long text, and repeat them with other token ids until it is full.

    Args:
        known: The responses.
        tokens: Length of the text.
        first: Index of the first response. Texts with different first responses share most tokens.
    """
    lap = np.concatenate([trace.response for trace in [*known[first:], *known[:first]]])
    laps = -(-tokens // len(lap))
    vocabulary = int(lap.max()) + 1
    response = np.concatenate([lap + turn * vocabulary for turn in range(laps)])[:tokens]
    return Trace("joined", first, np.zeros(0, np.int32), response.astype(np.int32))


def _regrouped(trace: Trace, group: int, vocabulary: int) -> Trace:
    shift = group * vocabulary
    return dataclasses.replace(
        trace, group=str(group), prompt=trace.prompt + shift, response=trace.response + shift
    )


def measure_calls(there: list[Side], texts: list[Trace], sizes: CostSizes) -> list[dict[str, Any]]:
    """Measure the calls of every side at every size, with the sides in turns."""
    rows = []
    most = {name: sizes.slow_tokens for name in SLOW}
    most[FIRST] = min(PLAIN_PYTHON_TOKENS, sizes.slow_tokens)
    for context in sizes.contexts:
        for batch in sizes.batches:
            fit = [side for side in there if batch * context <= most.get(side.name, math.inf)]
            rows += _calls_at(fit, texts, batch, context, sizes.steps)
    return rows


def _calls_at(
    there: list[Side], texts: list[Trace], batch: int, context: int, steps: int
) -> list[dict[str, Any]]:
    """Measure calls of one size, with the sides in turns of several calls.

    At the first call of a turn, the CPU's caches hold the other sides' data, as they do after an
    engine's forward pass. The time of these cold calls depends on the other sides, so it is kept
    separately.
    """
    work = Batch(texts, batch, context, steps)
    sessions = [side.open(K, batch, work.tokens.shape[1] + 64) for side in there]
    builds_s = [work.start(session) for session in sessions]
    warm_us: list[list[float]] = [[] for _ in sessions]
    cold_us: list[list[float]] = [[] for _ in sessions]
    for first in range(0, steps, BLOCK):
        grown = [(work.grow(), work.lengths.copy()) for _ in range(min(BLOCK, steps - first))]
        for turn in range(len(sessions)):
            i = (turn + first // BLOCK) % len(sessions)
            for call, (sampled, lengths) in enumerate(grown):
                took_s = _wall_s(sessions[i], work.ids, work.tokens, lengths, sampled)
                (warm_us if call else cold_us)[i].append(1e6 * took_s)
    rows = []
    for i, side in enumerate(there):
        q1, median, q3 = statistics.quantiles(warm_us[i], n=4, method="inclusive")
        rows.append(
            {
                "side": side.name, "rows": batch, "context": context,
                "median_us": median, "q1_us": q1, "q3_us": q3,
                "cold_us": statistics.median(cold_us[i]),
                "build_ns_per_token": 1e9 * builds_s[i] / (batch * context),
            }
        )  # fmt: skip
    return rows


def _wall_s(session: Session, *arguments: Any) -> float:
    started = time.perf_counter()
    session.propose(*arguments)
    return time.perf_counter() - started
