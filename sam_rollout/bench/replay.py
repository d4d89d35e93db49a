"""Greedy replay: counts the tokens per step if the model writes exactly the recorded text.

A draft is accepted up to its first mismatch, and the model adds one bonus token. Every request
begins with its prompt and one response token, as after prefill.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sam_rollout.bench.sessions import Session
from sam_rollout.core.traces import Int32Array, Trace

# The arguments of `Session.propose`: request ids, token ids, numbers of known tokens, and newly
# sampled tokens.
Call = tuple[list[str], Int32Array, Int32Array, list[list[int]]]


@dataclass
class Replay:
    """Sums over all steps of all requests."""

    steps: int = 0
    tokens: int = 0  # sampled tokens, without each response's first token, which is never drafted
    drafted: int = 0
    accepted: int = 0
    engine_steps: int = 0  # steps of the whole batch
    tail_steps: int = 0  # engine steps without waiting requests and with few running ones
    tail: int = 8  # maximum number of running requests in a tail step

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step, with the bonus token; NaN without steps."""
        return self.tokens / self.steps if self.steps else float("nan")

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens per step; NaN without steps."""
        return self.drafted / self.steps if self.steps else float("nan")


class Rows:
    """The running requests of a replay, in the rows of an engine's batch.

    `length` is the length of the longest text in tokens. All request ids begin with `name`.
    """

    def __init__(self, max_rows: int, length: int, name: str) -> None:
        self.waiting: deque[Trace] = deque()
        self.ids: list[str] = []  # the requests' ids by row
        self.tokens = np.zeros((max_rows, length), np.int32)  # row i has the text of request i
        # For each row, int32 [max_rows]: its number of known tokens, the number of tokens gained in
        # the last step, and the length of its text.
        self.known, self.gained, self._lengths = np.zeros((3, max_rows), np.int32)
        self._name, self._joined = name, 0

    def __len__(self) -> int:
        return len(self.ids)

    def submit(self, traces: Iterable[Trace]) -> None:
        """Add responses to the waiting ones; a response without tokens is ignored."""
        self.waiting.extend(trace for trace in traces if len(trace.response))

    def join(self, first: int = 1) -> list[tuple[str, Trace]]:
        """Put waiting responses into free rows; return these responses with their request ids.

        A new request knows its prompt and the beginning of its response; `first` is the number of
        known response tokens.
        """
        joined = []
        while self.waiting and len(self) < len(self.known):
            trace, row = self.waiting.popleft(), len(self)
            self.ids.append(f"{self._name}/{self._joined}")
            self._joined += 1
            text = trace.tokens
            self.tokens[row, : len(text)], self._lengths[row] = text, len(text)
            self.known[row], self.gained[row] = len(trace.prompt) + first, first
            joined.append((self.ids[row], trace))
        return joined

    def batch(self) -> tuple[list[str], Int32Array, Int32Array, Int32Array]:
        """Return request ids and texts, and copies of `known` and `gained` for these requests."""
        rows = len(self)
        return list(self.ids), self.tokens, self.known[:rows].copy(), self.gained[:rows].copy()

    def call(self) -> Call:
        """Return the arguments of `Session.propose`."""
        ids, tokens, known, gained = self.batch()
        rows = enumerate(zip(known - gained, known, strict=True))
        return ids, tokens, known, [tokens[row, start:end].tolist() for row, (start, end) in rows]

    def left(self, row: int) -> int:
        """Return the number of tokens that a row has yet to gain."""
        return int(self._lengths[row] - self.known[row])

    def advance(self, row: int, tokens: int) -> int:
        """Let a row gain tokens, and return their number.

        `tokens` is the wanted number. The row gains fewer tokens if fewer are left.
        """
        self.gained[row] = min(tokens, self.left(row))
        self.known[row] += self.gained[row]
        return int(self.gained[row])

    def verify(self, row: int, draft: list[int], parents: Sequence[int] | None = None) -> int:
        """Let a row gain its accepted tokens and one bonus token; return how many were accepted."""
        known = self.known[row]
        text = self.tokens[row, known : known + min(len(draft), self.left(row))]
        accepted = accepted_tokens(draft, text.tolist(), parents)
        self.advance(row, accepted + 1)
        return accepted

    def leave(self) -> list[str]:
        """Remove ended requests and return their ids; the last row fills each gap, as in vLLM."""
        ended = []
        for row in reversed(range(len(self))):
            if not self.left(row):
                ended.append(self.ids[row])
                self.ids[row] = self.ids[-1]
                last = len(self) - 1
                for column in (self.tokens, self.known, self.gained, self._lengths):
                    column[row] = column[last]
                self.ids.pop()
        return ended


def replay(
    session: Session, traces: list[Trace], into: Replay, step: int = 0, max_rows: int | None = None
) -> None:
    """Replay traces together, one step of all running requests at a time.

    Args:
        session: The drafter, which may have read other texts before.
        traces: The texts; a text without response tokens is ignored.
        into: The sums to add to.
        step: Number of the training step.
        max_rows: Maximum number of requests that run at once; None runs all.
    """
    if not any(len(trace.response) for trace in traces):
        return
    longest = max(len(trace.tokens) for trace in traces)
    rows = Rows(max_rows or len(traces), longest, f"{step}/{traces[0].group}")
    rows.submit(traces)
    while rows or rows.waiting:
        session.finish(rows.leave())
        for request_id, trace in rows.join():
            session.admit(request_id, trace, step)
        session.finish(rows.leave())  # removes responses of one token
        if not rows:
            continue
        for row, draft in enumerate(session.propose(*rows.call())):
            into.accepted += rows.verify(row, draft, session.parents(row))
            into.drafted += len(draft)
        into.tokens += int(rows.gained[: len(rows)].sum())
        into.steps += len(rows)
        into.engine_steps += 1
        into.tail_steps += len(rows) <= into.tail and not rows.waiting
    session.end_step()


def accepted_tokens(
    draft: Sequence[int], text: Sequence[int], parents: Sequence[int] | None = None
) -> int:
    """Return how many draft tokens are right; `text` has the tokens that the model writes next.

    If the draft is a tree, `parents` has the index of each token's predecessor, or -1.
    """
    last, accepted = -1, 0
    for place, token in enumerate(draft):
        before = place - 1 if parents is None else parents[place]
        if before == last and accepted < len(text) and token == text[accepted]:
            last, accepted = place, accepted + 1
    return accepted
