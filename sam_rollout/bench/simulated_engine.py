"""An engine on paper: recorded responses, sampled again step by step, with drafts or without.

What is drafted and decided is no model: drafter and gate are those of a run, and with the coupled
sampler a draft is accepted as far as it agrees with the recorded text. Only time is estimated: a
step takes as long as the recorded ones that computed as many tokens, and what drafting takes on
the machine that simulates.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam_rollout.bench.recorded_baseline import Baseline, Rollout
from sam_rollout.bench.replay import accepted_tokens
from sam_rollout.bench.simulated_drafts import Drafts
from sam_rollout.telemetry.traces import Trace

EXCHANGE_S = 0.05  # between two exchanges of texts among engines, as in a run


@dataclass
class Totals:
    """What an engine did."""

    steps: int = 0
    tail_s: float = 0.0
    verified_rows: int = 0  # requests with a draft, added up over the steps
    accepted: int = 0


class Engine:
    """A scheduler with continuous batching: who waits joins as soon as another one ends.

    Args:
        run: times and limits.
        folder: of the history that is drafted from; None drafts nothing.
        name: that no other engine has.
    """

    def __init__(self, run: Baseline, folder: Path | None = None, name: str = "") -> None:
        self._run, self._name = run, name
        self.clock_s = 0.0
        self.totals = Totals()
        self.drafts: Drafts | None = None
        self._waiting: deque[Trace] = deque()
        self._admitted = 0
        # Of running requests, row by row.
        self._ids: list[str] = []
        self._texts: list[list[int]] = []
        self._proposed: list[list[int]] = []
        self._known = np.zeros(run.max_num_seqs, np.int32)
        if folder is not None:
            length = run.longest
            self._tokens = np.zeros((run.max_num_seqs, length), np.int32)
            self.drafts = Drafts(folder, name, run.max_num_seqs, length, lambda: self.clock_s)

    @property
    def busy(self) -> bool:
        """Whether it has anything to do."""
        return bool(self._ids or self._waiting)

    def submit(self, traces: Iterable[Trace]) -> None:
        """Responses to sample, in order of arrival."""
        self._waiting.extend(trace for trace in traces if len(trace.response))

    def step(self) -> None:
        """One forward pass; without drafts and newcomers all up to the next end of a response."""
        decoding = len(self._ids)
        prompts = self._join()
        rows = len(self._ids)
        tail = rows <= self._run.tail_threshold and not self._waiting
        if self.drafts is None and not prompts:
            lengths = np.array([len(text) for text in self._texts])
            steps = int((lengths - self._known[:rows]).min())
            gained = np.full(rows, steps, np.int32)
            took_s = steps * self._run.times(rows)
        else:
            steps, gained = 1, np.ones(rows, np.int32)
            for row in range(decoding):
                gained[row] += self._verify(row)
            proposed = sum(map(len, self._proposed))
            took_s = self._run.times(decoding, proposed, prompts)
        self._known[:rows] += gained
        self.clock_s += took_s
        self.totals.steps += steps
        drafting_s = self._draft(gained)
        self.totals.tail_s += tail * (took_s + drafting_s)

    def _join(self) -> int:
        """Start who may; returns the tokens of their prompts."""
        prompts = 0
        while self._waiting and len(self._ids) < self._run.max_num_seqs:
            trace, row = self._waiting.popleft(), len(self._ids)
            text = trace.tokens
            self._admitted += 1
            self._ids.append(f"{self._name}/{self._admitted}")
            self._texts.append(text.tolist())
            self._proposed.append([])
            self._known[row] = len(trace.prompt)
            prompts += len(trace.prompt)
            if self.drafts is not None:
                self._tokens[row, : len(text)] = text
                self.drafts.admit(self._ids[row], trace)
        return prompts

    def _verify(self, row: int) -> int:
        """How many tokens a request's draft adds to the one of the model."""
        draft, text, known = self._proposed[row], self._texts[row], int(self._known[row])
        accepted = min(accepted_tokens(draft, text, known), len(text) - known - 1)
        self.totals.verified_rows += bool(draft)
        self.totals.accepted += accepted if draft else 0
        return accepted

    def _draft(self, gained: np.ndarray) -> float:
        """Take out who has ended, and draft for the others; returns what that took."""
        for row in reversed(range(len(self._ids))):
            if self._known[row] == len(self._texts[row]):
                gained[row] = gained[len(self._ids) - 1]
                self._leave(row)
        rows = len(self._ids)
        if self.drafts is None or not rows:
            return 0.0
        # A batch of its own each step, as the model runner hands it over.
        batch = list(self._ids), self._tokens, self._known[:rows].copy(), gained[:rows].copy()
        self._proposed, took_s = self.drafts.step(*batch)
        self.clock_s += took_s
        return took_s

    def _leave(self, row: int) -> None:
        """A request ends; the last row moves up, as in vLLM's batch."""
        last = len(self._ids) - 1
        if self.drafts is not None:
            self.drafts.finish(self._ids[row])
            self._tokens[row] = self._tokens[last]
        self._known[row] = self._known[last]
        columns: tuple[list, ...] = self._ids, self._texts, self._proposed
        for column in columns:
            column[row] = column[last]
            column.pop()


@dataclass(frozen=True)
class Outcome:
    """What a rollout took: until its slowest engine had finished, round after round.

    Attributes:
        tail_s: the long tails of the slowest engines.
        verified_rows, accepted: requests with a draft, and their accepted tokens, over all steps.
    """

    rollout_s: float
    tail_s: float
    steps: int
    verified_rows: int
    accepted: int


def sample(
    run: Baseline, *, drafts: bool, progress: Callable[[int], None] = lambda responses: None
) -> Iterator[Outcome]:
    """Sample the rollouts of a run, one after the other.

    Args:
        run: what was recorded.
        drafts: with those of `sam=on`, which keep what earlier rollouts sampled.
        progress: called with the responses of each round that is done.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())) if drafts else None
        engines = [Engine(run, folder and folder / str(i), str(i)) for i in range(run.engines)]
        for rollout in run.rollouts:
            yield _sample(rollout, engines, progress)


def _sample(
    rollout: Rollout, engines: Sequence[Engine], progress: Callable[[int], None]
) -> Outcome:
    rollout_s = tail_s = 0.0
    for engine in engines:
        engine.totals = Totals()
    for responses in rollout.rounds:
        begin_s = max(engine.clock_s for engine in engines)
        tails_s = [engine.totals.tail_s for engine in engines]
        for number, engine in enumerate(engines):
            engine.clock_s = begin_s
            engine.submit(one.trace for one in responses if one.engine == number)
        _run(engines)
        slowest = max(range(len(engines)), key=lambda number: engines[number].clock_s)
        rollout_s += engines[slowest].clock_s - begin_s
        tail_s += engines[slowest].totals.tail_s - tails_s[slowest]
        progress(len(responses))
    for engine in engines:
        if engine.drafts is not None:
            engine.drafts.end_step()
    steps, rows, accepted = (
        sum(getattr(engine.totals, name) for engine in engines)
        for name in ("steps", "verified_rows", "accepted")
    )
    return Outcome(rollout_s, tail_s, steps, rows, accepted)


def _run(engines: Sequence[Engine]) -> None:
    """Run until all have finished; the engine whose clock is behind takes the next step."""
    share = len(engines) > 1 and engines[0].drafts is not None
    next_s = 0.0
    while busy := [engine for engine in engines if engine.busy]:
        engine = min(busy, key=lambda one: one.clock_s)
        if share and engine.clock_s >= next_s:
            _exchange(engines)
            next_s = engine.clock_s + EXCHANGE_S
        engine.step()


def _exchange(engines: Sequence[Engine]) -> None:
    """Every engine hears what the others have sampled since the last time."""
    drafting = [engine.drafts for engine in engines if engine.drafts is not None]
    told = [drafts.exchange([]) for drafts in drafting]
    for number, drafts in enumerate(drafting):
        others = [piece for i, pieces in enumerate(told) if i != number for piece in pieces]
        drafts.exchange(others)
