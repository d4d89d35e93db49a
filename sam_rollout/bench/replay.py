"""Greedy replay: counts the tokens per step if the model writes exactly the recorded text.

A draft is accepted up to its first mismatch, and the model adds one bonus token. Every request
begins with its prompt and one response token, as after prefill.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sam_rollout.bench.sides import Session
from sam_rollout.telemetry.traces import Trace


@dataclass
class Replay:
    """Sums over all steps of all requests."""

    steps: int = 0
    tokens: int = 0  # without the first token of each response, which cannot be drafted
    drafted: int = 0
    accepted: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, with the bonus token; NaN without steps."""
        return self.tokens / self.steps if self.steps else float("nan")

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens per step; NaN without steps."""
        return self.drafted / self.steps if self.steps else float("nan")

    def book(self, drafted: int, accepted: int, remaining: int) -> int:
        """Count one step of one request; return the number of its tokens.

        Args:
            drafted: Number of draft tokens.
            accepted: Number of accepted draft tokens.
            remaining: Number of tokens left in the text, at least 1; the step yields no more.
        """
        tokens = min(accepted + 1, remaining)
        self.steps += 1
        self.tokens += tokens
        self.drafted += drafted
        self.accepted += accepted
        return tokens


def replay(session: Session, traces: list[Trace], into: Replay, step: int = 0) -> None:
    """Replay traces together, one step of all requests at a time.

    Args:
        session: The drafter, which keeps the texts that it has seen before.
        traces: The texts; those without response tokens are ignored.
        into: The sums to add to.
        step: Number of the training step, for sources that use earlier steps.
    """
    traces = [trace for trace in traces if len(trace.response) > 0]
    if not traces:
        return
    texts = [trace.tokens.tolist() for trace in traces]
    token_ids = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    ids = [f"{step}/{trace.group}/{i}" for i, trace in enumerate(traces)]
    for request_id, trace in zip(ids, traces, strict=True):
        session.admit(request_id, trace, step)
    known = [len(trace.prompt) + 1 for trace in traces]
    sampled = [text[n - 1 : n] for text, n in zip(texts, known, strict=True)]
    while True:
        ended = [row for row, text in enumerate(texts) if known[row] == len(text)]
        session.finish([ids[row] for row in ended])
        for row in reversed(ended):  # the last row moves up, as in vLLM's batch
            last = len(ids) - 1
            token_ids[row] = token_ids[last]
            columns: tuple[list[Any], ...] = (ids, texts, known, sampled)
            for column in columns:
                column[row] = column[last]
                column.pop()
        if not ids:
            break
        drafts = session.propose(ids, token_ids, np.array(known, np.int32), sampled)
        for row, draft in enumerate(drafts):
            text, n = texts[row], known[row]
            right = accepted_tokens(draft, text, n)
            known[row] += into.book(len(draft), right, len(text) - n)
            sampled[row] = text[n : known[row]]
        ids = list(ids)  # the model runner passes a new list in each step, too
    session.end_step()


def accepted_tokens(draft: list[int], text: list[int], at: int) -> int:
    """Return how many first draft tokens equal the text from position `at` on."""
    for i, (drafted, true) in enumerate(zip(draft, text[at : at + len(draft)], strict=False)):
        if drafted != true:
            return i
    return min(len(draft), len(text) - at)
