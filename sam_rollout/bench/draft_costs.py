"""Measures the time of drafters (sides), which take turns and are called as in an engine."""

import dataclasses
import math
import statistics
import time
from typing import Any

import numpy as np

from sam_rollout.bench.replay import Call, Rows
from sam_rollout.bench.sessions import Session
from sam_rollout.bench.sides import ARCTIC_4, FIRST, Side
from sam_rollout.core.traces import Trace

K = 3
BLOCK = 10  # number of consecutive calls in a side's turn


@dataclasses.dataclass(frozen=True)
class CostSizes:
    """The sizes of the measurement; lengths are in tokens."""

    batches: tuple[int, ...] = (1, 8, 32, 128)
    contexts: tuple[int, ...] = (4_096, 32_768)
    steps: int = 100
    slow_tokens: int = 1_100_000  # maximum size of a batch, in tokens, for the sides in `SLOW`

    @property
    def longest(self) -> int:
        """Number of tokens that each text must have."""
        return max(self.contexts) + 4 * self.steps + 64


# Maximum size of a batch, in tokens, for the side FIRST, an automaton in plain Python.
PLAIN_PYTHON_TOKENS = 131_072
SLOW = (ARCTIC_4, FIRST)  # these sides take many times the time and memory of the other sides


def batch_of(texts: list[Trace], rows: int, length: int) -> Rows:
    """Return a batch of waiting requests; `length` is the number of tokens of each text.

    The texts are responses to one prompt. If there are more rows than texts, the texts are used
    again with shifted token ids, as if they were responses to another prompt.
    """
    vocabulary = 1 + max(int(text.tokens.max()) for text in texts)
    batch = Rows(rows, length, "request")  # prompts are empty: a text is its response
    for row in range(rows):
        text, group = texts[row % len(texts)], row // len(texts)
        response = text.response[:length] + group * vocabulary
        batch.waiting.append(dataclasses.replace(text, group=str(group), response=response))
    return batch


def joined(known: list[Trace], tokens: int, first: int = 0) -> Trace:
    """Join responses into one text; `tokens` is its length.

    If the responses are too short, they are repeated with shifted token ids. `first` is the index
    of the response with which the text begins. Two texts with different beginnings still have most
    tokens in common.
    """
    lap = np.concatenate([trace.response for trace in [*known[first:], *known[:first]]])
    laps = -(-tokens // len(lap))
    vocabulary = int(lap.max()) + 1
    response = np.concatenate([lap + turn * vocabulary for turn in range(laps)])[:tokens]
    return Trace("joined", first, np.zeros(0, np.int32), response.astype(np.int32))


def measure_calls(there: list[Side], texts: list[Trace], sizes: CostSizes) -> list[dict[str, Any]]:
    """Measure the time per call of every side at every size."""
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
    """Measure the time per call at one size.

    In the first call of a side's turn, the CPU's caches hold the data of other sides. The times of
    first calls are therefore kept separately, as cold times.
    """
    length = context + 3 * steps
    requests = batch_of(texts, batch, length)
    admitted = requests.join(context)
    sessions = [side.open(K, batch, length + 64) for side in there]
    builds_us = []
    for session in sessions:
        for request_id, trace in admitted:
            session.admit(request_id, trace, 0)
        builds_us.append(_wall_us(session, requests.call()))
    warm_us: list[list[float]] = [[] for _ in sessions]
    cold_us: list[list[float]] = [[] for _ in sessions]
    for first in range(0, steps, BLOCK):
        calls = []
        for step in range(first, min(first + BLOCK, steps)):
            for row in range(batch):
                requests.advance(row, 1 + (row + step) % 3)
            calls.append(requests.call())
        for turn in range(len(sessions)):
            i = (turn + first // BLOCK) % len(sessions)
            took_us = [_wall_us(sessions[i], call) for call in calls]
            cold_us[i].append(took_us[0])
            warm_us[i] += took_us[1:]
    rows = []
    for i, side in enumerate(there):
        q1, median, q3 = statistics.quantiles(warm_us[i], n=4, method="inclusive")
        rows.append(
            {
                "side": side.name, "rows": batch, "context": context,
                "median_us": median, "q1_us": q1, "q3_us": q3,
                "cold_us": statistics.median(cold_us[i]),
                "build_ns_per_token": 1e3 * builds_us[i] / (batch * context),
            }
        )  # fmt: skip
    return rows


def _wall_us(session: Session, call: Call) -> float:
    started_ns = time.perf_counter_ns()
    session.propose(*call)
    return (time.perf_counter_ns() - started_ns) / 1e3
