"""Simulates an engine that replays recorded responses, with or without drafts.

The drafter and the gate are the same as in a real run. A draft is accepted as far as it agrees with
the recorded text. A step takes the time of recorded steps that computed the same number of tokens,
plus the drafter's time on this machine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sam_rollout.bench.recorded_baseline import Baseline, Rollout
from sam_rollout.bench.replay import Rows
from sam_rollout.bench.sessions import OwnSession
from sam_rollout.config import SamConfig
from sam_rollout.core.traces import Trace

EXCHANGE_S = 0.05  # time between two exchanges of texts by the engines, as in a run


@dataclass
class Outcome:
    """The result of a simulated rollout, or one engine's part of the result."""

    rollout_s: float = 0.0  # time of all rounds; a round ends with its slowest engine
    tail_s: float = 0.0  # time that each round's slowest engine spent in the long tail
    steps: int = 0
    verified_rows: int = 0  # number of verified drafts, over all steps
    accepted: int = 0  # accepted draft tokens


class Engine:
    """An engine with continuous batching: a waiting request joins as soon as another one ends."""

    def __init__(self, run: Baseline, name: str, *, drafts: bool) -> None:
        self._run, self.name = run, name
        self.clock_s = 0.0
        self.totals = Outcome()  # this engine's part of the current rollout
        self.rows = Rows(run.max_num_seqs, run.longest, name)
        self.session: OwnSession | None = None  # drafter and gate
        self._drafts: list[list[int]] = []  # by row
        if drafts:
            config = SamConfig.from_mapping({"sources": {"run": {"when": "always"}}})
            longest = run.longest + config.max_draft_tokens + 1
            self.session = OwnSession(config, run.max_num_seqs, longest, lambda: self.clock_s)

    def step(self) -> None:
        """Run one step, or several steps at once.

        If there is no drafter and no new prompt, steps are run until a response ends.
        """
        rows, decoding, steps = self.rows, len(self.rows), 1
        joined = rows.join(0)
        prompts = sum(len(trace.prompt) for _, trace in joined)
        tail = len(rows) <= self._run.tail_threshold and not rows.waiting
        if self.session is None and not prompts:
            steps = min(map(rows.left, range(decoding)))
            for row in range(len(rows)):
                rows.advance(row, steps)
            took_s = steps * self._run.times(decoding)
        else:
            took_s = self._run.times(decoding, sum(map(len, self._drafts)), prompts)
            self._drafts += [[]] * (len(rows) - len(self._drafts))
            for row, draft in enumerate(self._drafts):
                rows.verify(row, draft)
                self.totals.verified_rows += bool(draft)
                self.totals.accepted += int(rows.gained[row]) - 1
        self.clock_s += took_s
        self.totals.steps += steps
        drafting_s = self._draft(joined, rows.leave())
        self.totals.tail_s += tail * (took_s + drafting_s)

    def _draft(self, joined: list[tuple[str, Trace]], ended: list[str]) -> float:
        self._drafts = []
        if self.session is None:
            return 0.0
        for request_id, trace in joined:
            self.session.admit(request_id, trace, trace.step)
        self.session.finish(ended)
        if not self.rows:
            return 0.0
        self._drafts = self.session.step(*self.rows.batch()).to_lists()
        self.clock_s += self.session.took_s
        return self.session.took_s


def sample(
    run: Baseline, *, drafts: bool, progress: Callable[[int], None] = lambda responses: None
) -> Iterator[Outcome]:
    """Simulate the rollouts of a run, one after the other.

    With `drafts`, the engines draft as with `sam=on`, also from texts of earlier rollouts. After
    each round, `progress` is called with the round's number of responses.
    """
    engines = [Engine(run, str(number), drafts=drafts) for number in range(run.engines)]
    for rollout in run.rollouts:
        yield _sample(rollout, engines, progress)


def _sample(
    rollout: Rollout, engines: Sequence[Engine], progress: Callable[[int], None]
) -> Outcome:
    found = Outcome()
    for engine in engines:
        engine.totals = Outcome()
    for responses in rollout.rounds:
        begin_s = max(engine.clock_s for engine in engines)
        for number, engine in enumerate(engines):
            engine.clock_s, engine.totals.tail_s = begin_s, 0.0
            engine.rows.submit(one.trace for one in responses if one.engine == number)
        _run(engines)
        slowest = max(engines, key=lambda engine: engine.clock_s)
        found.rollout_s += slowest.clock_s - begin_s
        found.tail_s += slowest.totals.tail_s
        progress(len(responses))
    for engine in engines:
        if engine.session is not None:
            engine.session.end_step()
        found.steps += engine.totals.steps
        found.verified_rows += engine.totals.verified_rows
        found.accepted += engine.totals.accepted
    return found


def _run(engines: Sequence[Engine]) -> None:
    """Run all engines to the end; the engine with the earliest clock takes the next step."""
    next_s = 0.0
    while busy := [engine for engine in engines if engine.rows or engine.rows.waiting]:
        engine = min(busy, key=lambda one: one.clock_s)
        if engine.clock_s >= next_s:
            _exchange(engines)
            next_s = engine.clock_s + EXCHANGE_S
        engine.step()


def _exchange(engines: Sequence[Engine]) -> None:
    """Send every engine what the other engines have sampled since the last exchange."""
    sessions = {engine.name: engine.session for engine in engines if engine.session}
    if len(sessions) < 2:
        return
    sampled = {name: session.exchange(name, []) for name, session in sessions.items()}
    for name, session in sessions.items():
        others = [piece for other in sampled if other != name for piece in sampled[other]]
        session.exchange(name, others)
