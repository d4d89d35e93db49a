"""`sam-rollout bench drafter`: how good drafts are and what they cost, ours beside every other.

All sides see the same texts in the same order, in one process, and take turns wherever time is
measured. Acceptance is greedy replay (`replay.py`) and does not depend on the machine; times do.
What the user's own sets say goes before what generated texts say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sam_rollout.bench import generator, sides
from sam_rollout.bench.draft_costs import CostSizes, measure_calls, measure_costs
from sam_rollout.bench.machine import machine
from sam_rollout.bench.replay import CONTEXT_BIN, Replay, read_through, replay
from sam_rollout.bench.sides import Side
from sam_rollout.bench.traces import Trace, groups_of

COT, GROUPS = "generated CoT", "generated groups"  # the latter with a second epoch
KS = (3, 8)
CONTEXT_K = 3  # of the curve against context length
SEED = 11  # of the generated texts; they were fitted with another
# Of single responses, where others have nothing more to draft from.
SINGLE_SIDES = (sides.OWN, sides.ADAPTIVE, sides.FIRST, sides.NGRAM_24, sides.ARCTIC_4)
TIMED_SIDES = (sides.OWN, sides.OWN_SIBLINGS, sides.OWN_RUN, sides.DEFAULT, sides.FIRST,
               sides.NGRAM, sides.NGRAM_24, sides.ARCTIC_4)  # fmt: skip
COSTED_SIDES = (sides.OWN, sides.OWN_SIBLINGS, sides.OWN_RUN)


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Pairs are (number of texts or groups, tokens of the longest)."""

    cot: tuple[int, int] = (8, 38_000)
    groups: tuple[int, int] = (4, 8_000)
    siblings: int = 16
    costs: CostSizes = field(default_factory=CostSizes)


# Under 50 s of one core with compiled kernels. Calls are those of the full sizes, because targets
# speak of them; it is texts that are fewer and shorter, and less is read for the slowest call.
QUICK = Sizes(
    cot=(2, 10_000),
    groups=(1, 3_000),
    costs=CostSizes(steps=30, slow_tokens=65_536, slowest_rows=8, longest_text=65_536, rounds=2),
)


@dataclass(frozen=True)
class Episode:
    """Texts sampled together, with or without drafts."""

    traces: list[Trace]
    step: int = 0
    drafting: bool = True


@dataclass(frozen=True)
class Data:
    """A set of texts: runs of episodes. One session lasts a run and ends with it."""

    name: str
    sides: tuple[str, ...]
    runs: list[list[Episode]]
    generated: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(trace.tokens) for episode in self._episodes() for trace in episode.traces)

    @property
    def rows(self) -> int:
        """Most requests at once."""
        return max(len(episode.traces) for episode in self._episodes())

    def size(self) -> dict[str, Any]:
        """How much there is. JSON values."""
        drafted = [t for episode in self._episodes() if episode.drafting for t in episode.traces]
        read = [t for episode in self._episodes() if not episode.drafting for t in episode.traces]
        return {
            "name": self.name,
            "generated": self.generated,
            "groups": len({trace.group for trace in drafted}),
            "siblings": self.rows,
            "responses": len(drafted),
            "tokens": sum(len(trace.response) for trace in drafted),
            "read_before": len(read),
        }

    def _episodes(self) -> Iterator[Episode]:
        return (episode for run in self.runs for episode in run)


@dataclass
class Bench:
    """One measurement: sizes, sets of the user, seed of the generated ones, sides that are there.

    `progress` is called with the name of each part before it is measured.
    """

    sizes: Sizes = field(default_factory=Sizes)
    sets: dict[str, list[Trace]] = field(default_factory=dict)
    seed: int = SEED
    there: dict[str, Side] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    progress: Callable[[str], object] = lambda part: None

    def __post_init__(self) -> None:
        if not self.there:
            self.there, self.missing = sides.available()

    def run(self) -> dict[str, Any]:
        """Measure everything. JSON values."""
        datasets = self.datasets()
        acceptance, context = self.acceptance(datasets)
        self.progress("calls")
        problem = generator.Problem(0, seed=self.seed)
        texts = [
            problem.response(sibling, self.sizes.costs.longest)
            for sibling in range(self.sizes.siblings)
        ]
        calls = measure_calls(self._of(TIMED_SIDES), texts, self.sizes.costs)
        self.progress("costs")
        costs = measure_costs(self._of(COSTED_SIDES), texts, self.sizes.costs)
        return {
            "machine": {**machine("numpy", "numba"), **sides.versions()},
            "setting": {"seed": self.seed, **asdict(self.sizes)},
            "missing": self.missing,
            "sets": [data.size() for data in datasets],
            "acceptance": acceptance,
            "context": context,
            "calls": calls,
            "costs": costs,
        }

    def acceptance(self, datasets: list[Data]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows of every side and k, and those against the length of the context."""
        acceptance, context = [], []
        for data in datasets:
            self.progress(data.name)
            for k in KS:
                for side in self._of(data.sides):
                    result = accept(side, data, k)
                    acceptance.append(_row(data, side, k, result))
                    if k == CONTEXT_K:
                        context += _context_rows(data, side, result)
        return acceptance, context

    def datasets(self) -> list[Data]:
        """The texts, those of the user first."""
        sizes, seed, every_side = self.sizes, self.seed, tuple(self.there)
        count, length = sizes.groups
        groups = [
            [
                trace
                for epoch in (0, 1)
                for trace in generator.group(index, sizes.siblings, length, seed, epoch)
            ]
            for index in range(count)
        ]
        singles = [[Episode([trace])] for trace in generator.singles(*sizes.cot, seed)]
        return [
            *(Data(name, every_side, [run_of(one)], generated=False)
              for name, one in self.sets.items()),
            Data(GROUPS, every_side, [run_of(one) for one in groups]),
            Data(COT, SINGLE_SIDES, singles),
        ]  # fmt: skip

    def _of(self, names: tuple[str, ...]) -> list[Side]:
        return [self.there[name] for name in names if name in self.there]


def accept(side: Side, data: Data, k: int) -> Replay:
    """Replay all texts of a set."""
    result = Replay()
    session = None
    for run in data.runs:
        if session is None or side.remembers:
            session = side.open(k, data.rows, data.longest + 64)
        for episode in run:
            if episode.drafting:
                replay(session, episode.traces, result, episode.step)
            else:
                read_through(session, episode.traces, episode.step)
    return result


def run_of(traces: list[Trace]) -> list[Episode]:
    """Groups in order of their steps.

    Where the same prompt comes back, its earlier responses are read without drafting: an earlier
    epoch, which serves every side that remembers it, and is measured of none. Turns of one
    conversation have prompts of their own, and all are measured.
    """
    groups = groups_of(traces)
    prompts = [(group[0].group, group[0].prompt.tobytes()) for group in groups]
    last = {prompt: place for place, prompt in enumerate(prompts)}
    return [
        Episode(group, group[0].step, last[prompt] == place)
        for place, (group, prompt) in enumerate(zip(groups, prompts, strict=True))
    ]


def _row(data: Data, side: Side, k: int, result: Replay) -> dict[str, Any]:
    return {
        "data": data.name,
        "side": side.name,
        "k": k,
        "mean_acceptance_length": result.mean_acceptance_length,
        "drafted_per_step": result.drafted_per_step,
        "drafted_per_accepted": result.drafted_per_accepted if result.accepted else None,
        "steps": result.steps,
        "tokens": result.tokens,
    }


def _context_rows(data: Data, side: Side, result: Replay) -> list[dict[str, Any]]:
    """Acceptance against the length of the context."""
    return [
        {
            "data": data.name,
            "side": side.name,
            "from": place * CONTEXT_BIN,
            "mean_acceptance_length": result.tokens_at[place] / steps,
            "steps": steps,
        }
        for place, steps in sorted(result.steps_at.items())
    ]
