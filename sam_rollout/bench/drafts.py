"""`sam-rollout bench drafter`: how good drafts are and what they cost, ours beside every other.

All sides see the same texts in one process and take turns wherever time is measured. Acceptance is
greedy replay (`replay.py`) and does not depend on the machine; times do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from sam_rollout.bench import corpora, generator, sides
from sam_rollout.bench.draft_costs import CostSizes, measure_calls, measure_costs
from sam_rollout.bench.machine import machine
from sam_rollout.bench.replay import CONTEXT_BIN, Replay, read_through, replay
from sam_rollout.bench.sides import Side
from sam_rollout.bench.traces import Trace, groups_of

COT, GROUPS, REWRITES, CODE, PROSE = "CoT", "CoT groups", "rewrites", "code", "prose"
SECOND_EPOCH, TRACES = "second epoch", "traces"
KS = (3, 8)
CONTEXT_K = 3  # of the curve against context length, as published
# Of the generated texts. The generator was fitted on others; the constants of the rule that drafts
# from own text were chosen on these: another seed makes texts that nothing was chosen on.
SEED = 11
SINGLE_SIDES = (sides.OWN, sides.ADAPTIVE, sides.FIRST, sides.NGRAM, sides.NGRAM_24, sides.ARCTIC,
                sides.ARCTIC_4)  # fmt: skip
GROUP_SIDES = (sides.OWN, sides.ADAPTIVE, sides.OWN_SIBLINGS, sides.FIRST,
               sides.NGRAM_24, sides.ARCTIC, sides.ARCTIC_4)  # fmt: skip
# Of second epochs and of a run's own traces, where every source has something to draft from.
EPOCH_SIDES = (sides.OWN, *sides.JOINED, sides.OWN_RUN, sides.ALL_SOURCES, sides.ARCTIC)
TRACE_SIDES = tuple(dict.fromkeys((*GROUP_SIDES, *EPOCH_SIDES)))
SWEEP_SIDES = (sides.OWN, sides.ADAPTIVE, sides.FIRST)
TIMED_SIDES = (sides.OWN, sides.OWN_SIBLINGS, sides.OWN_RUN, sides.FIRST, sides.NGRAM,
               sides.NGRAM_24, sides.ARCTIC)  # fmt: skip
COSTED_SIDES = (sides.OWN, sides.OWN_SIBLINGS, sides.OWN_RUN)


@dataclass(frozen=True)
class Sizes:
    """How much is measured. Pairs are (number of texts or groups, tokens of the longest)."""

    cot: tuple[int, int] = (8, 38_000)
    groups: tuple[int, int] = (6, 8_000)
    rewrites: tuple[int, int] = (4, 2_000)
    texts: tuple[int, int] = (8, 16_000)  # code and prose
    epochs: tuple[int, int] = (4, 4_000)
    ks_of_others: tuple[int, ...] = KS  # of all texts but chains of thought
    siblings: int = 16
    sweep: tuple[int, ...] = tuple(range(1, 17))
    sweep_texts: int = 2
    costs: CostSizes = field(default_factory=CostSizes)


# Under 50 s of one core with compiled kernels. Calls are those of the full sizes, because targets
# speak of them; it is texts that are fewer and shorter, and less is read for the slowest call.
QUICK = Sizes(
    cot=(2, 10_000),
    groups=(2, 3_000),
    rewrites=(1, 1_500),
    texts=(4, 6_000),
    ks_of_others=(3,),
    epochs=(1, 2_000),
    sweep=(1, 2, 4, 8, 16),
    sweep_texts=1,
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
    ks: tuple[int, ...] = KS

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(len(trace.tokens) for trace in self._traces())

    @property
    def rows(self) -> int:
        """Most requests at once."""
        return max(len(episode.traces) for run in self.runs for episode in run)

    def _traces(self) -> Iterator[Trace]:
        return (trace for run in self.runs for episode in run for trace in episode.traces)


@dataclass
class Bench:
    """One measurement: sizes, texts of the user, seed of the generated ones, sides that are there.

    `progress` is called with the name of each part before it is measured.
    """

    sizes: Sizes = field(default_factory=Sizes)
    traces: list[Trace] = field(default_factory=list)
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
        self.progress("acceptance against k")
        sweep = self._sweep(datasets[0])
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
            "acceptance": acceptance,
            "context": context,
            "sweep": sweep,
            "calls": calls,
            "costs": costs,
        }

    def acceptance(self, datasets: list[Data]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Rows of every side and k, and those against the length of the context."""
        acceptance, context = [], []
        for data in datasets:
            self.progress(data.name)
            for k in data.ks:
                for side in self._of(data.sides):
                    result = accept(side, data, k)
                    acceptance.append(_row(data, side, k, result))
                    if k == CONTEXT_K and data.name in (COT, TRACES):
                        context += _context_rows(data, side, result)
        return acceptance, context

    def datasets(self) -> list[Data]:
        """The texts, those of the user last."""
        sizes, seed, ks = self.sizes, self.seed, self.sizes.ks_of_others
        count, length = sizes.texts
        found = [
            Data(COT, SINGLE_SIDES, _each(generator.singles(*sizes.cot, seed))),
            Data(CODE, SINGLE_SIDES, _each(corpora.source_code(length)[:count]), ks),
            Data(PROSE, SINGLE_SIDES, _each(corpora.prose(length)[:count]), ks),
            Data(GROUPS, GROUP_SIDES, self._groups(generator.group, *sizes.groups)),
            Data(REWRITES, GROUP_SIDES, self._groups(generator.rewrites, *sizes.rewrites), ks),
            Data(SECOND_EPOCH, EPOCH_SIDES, self._epochs(*sizes.epochs), ks),
        ]
        if self.traces:
            run = [Episode(group, group[0].step) for group in groups_of(self.traces)]
            found.append(Data(TRACES, TRACE_SIDES, [run]))
        return found

    def _groups(self, make: Any, count: int, length: int) -> list[list[Episode]]:
        siblings, seed = self.sizes.siblings, self.seed
        return [[Episode(make(index, siblings, length, seed))] for index in range(count)]

    def _epochs(self, count: int, length: int) -> list[list[Episode]]:
        runs = []
        for index in range(count):
            first = generator.group(index, self.sizes.siblings, length, self.seed)
            second = generator.second_epoch(first, self.seed)
            runs.append([Episode(first, 0, drafting=False), Episode(second, 1)])
        return runs

    def _of(self, names: tuple[str, ...]) -> list[Side]:
        return [self.there[name] for name in names if name in self.there]

    def _sweep(self, cot: Data) -> list[dict[str, Any]]:
        """Acceptance of some chains of thought against k."""
        data = Data(cot.name, SWEEP_SIDES, cot.runs[: self.sizes.sweep_texts])
        return [
            _row(data, side, k, accept(side, data, k))
            for k in self.sizes.sweep
            for side in self._of(data.sides)
        ]


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


def _each(traces: list[Trace]) -> list[list[Episode]]:
    """A run for each response: nothing is there to learn from but itself."""
    return [[Episode([trace])] for trace in traces]


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
