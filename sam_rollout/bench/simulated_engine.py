"""A simulated engine that samples recorded responses again, with or without drafts.

Drafter and gate are those of a real run. A draft is accepted as far as it agrees with the recorded
text, as with the coupled sampler. Only time is estimated: a step takes the time of recorded steps
that computed the same number of tokens, plus the drafter's time on this machine.
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

EXCHANGE_S = 0.05  # time between two exchanges of texts among engines, as in a run


@dataclass
class Totals:
    """The sums over an engine's steps."""

    steps: int = 0
    tail_s: float = 0.0
    verified_rows: int = 0  # requests with a draft, summed over steps
    accepted: int = 0


class Engine:
    """A scheduler with continuous batching: a waiting request joins as soon as another one ends.

    Args:
        run: The recorded run, with times and limits.
        folder: Folder of ended responses; None drafts nothing.
        name: A unique name.
    """

    def __init__(self, run: Baseline, folder: Path | None = None, name: str = "") -> None:
        self._run, self._name = run, name
        self.clock_s = 0.0
        self.totals = Totals()
        self.drafts: Drafts | None = None
        self._waiting: deque[Trace] = deque()
        self._admitted = 0
        # The running requests, by row.
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
        """Whether the engine has requests."""
        return bool(self._ids or self._waiting)

    def submit(self, traces: Iterable[Trace]) -> None:
        """Add responses to sample, in order of arrival."""
        self._waiting.extend(trace for trace in traces if len(trace.response))

    def step(self) -> None:
        """Run a step; without drafts and new requests, run all steps until a response ends."""
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
        """Start waiting requests while there is room; return the number of their prompt tokens."""
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
        """Return the number of accepted tokens of a request's draft."""
        draft, text, known = self._proposed[row], self._texts[row], int(self._known[row])
        accepted = min(accepted_tokens(draft, text, known), len(text) - known - 1)
        self.totals.verified_rows += bool(draft)
        self.totals.accepted += accepted if draft else 0
        return accepted

    def _draft(self, gained: np.ndarray) -> float:
        """Remove ended requests and draft for the others; return the drafter's seconds."""
        for row in reversed(range(len(self._ids))):
            if self._known[row] == len(self._texts[row]):
                gained[row] = gained[len(self._ids) - 1]
                self._leave(row)
        rows = len(self._ids)
        if self.drafts is None or not rows:
            return 0.0
        # The model runner passes new lists and arrays in each step, too.
        batch = list(self._ids), self._tokens, self._known[:rows].copy(), gained[:rows].copy()
        self._proposed, took_s = self.drafts.step(*batch)
        self.clock_s += took_s
        return took_s

    def _leave(self, row: int) -> None:
        """Remove an ended request; the last row takes its place, as in vLLM's batch."""
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
    """The result of a simulated rollout; a round ends when its slowest engine has finished.

    Attributes:
        rollout_s: Time of all rounds.
        tail_s: Time of the slowest engines' long tails.
        steps: Number of engine steps.
        verified_rows: Number of verified drafts, over all steps.
        accepted: Number of accepted draft tokens.
    """

    rollout_s: float
    tail_s: float
    steps: int
    verified_rows: int
    accepted: int


def sample(
    run: Baseline, *, drafts: bool, progress: Callable[[int], None] = lambda responses: None
) -> Iterator[Outcome]:
    """Simulate the rollouts of a run, one after the other.

    Args:
        run: The recorded run.
        drafts: Whether the engines draft as with `sam=on`, also from earlier rollouts.
        progress: Called with the number of responses after each round.
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
    """Run until all engines have finished; the one with the earliest clock takes the next step."""
    share = len(engines) > 1 and engines[0].drafts is not None
    next_s = 0.0
    while busy := [engine for engine in engines if engine.busy]:
        engine = min(busy, key=lambda one: one.clock_s)
        if share and engine.clock_s >= next_s:
            _exchange(engines)
            next_s = engine.clock_s + EXCHANGE_S
        engine.step()


def _exchange(engines: Sequence[Engine]) -> None:
    """Send every engine the pieces that the others have sampled since the last exchange."""
    drafting = [engine.drafts for engine in engines if engine.drafts is not None]
    sampled = [drafts.exchange([]) for drafts in drafting]
    for number, drafts in enumerate(drafting):
        others = [piece for i, pieces in enumerate(sampled) if i != number for piece in pieces]
        drafts.exchange(others)
