"""Fits the acceptance that the simulator uses where no traces were recorded; no engine needed.

    python -m benchmarks.simulate_acceptance [--output benchmarks/results/simulate_acceptance.json]

Replays drafters on the generator's texts (`sam_rollout/bench/generator.py`), whose repetitions are
calibrated to the acceptance published for Qwen3-8B on MATH-500, and counts accepted drafts by
context. `first occurrence` stands for the published drafter.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

from sam_rollout.bench import generator, sides
from sam_rollout.bench.machine import machine
from sam_rollout.bench.replay import read_through
from sam_rollout.simulation.acceptance import Counts, count_replay
from sam_rollout.simulation.recorded import FIRST, HISTORY, OWN, SIBLINGS, siblings_table

EDGES = (0, 1_000, 2_500, 5_000, 8_000, 12_000, 16_000, 20_000, 26_000)
KS = (3, 4)  # a table for each: how often a step is right depends on where steps begin
SEED = 3
LENGTHS = (38_000,) * 6 + (11_000,) * 8 + (2_500,) * 40  # the early stretches are short
GROUPS, GROUP_LENGTH = 1, 26_000
OUTPUT = Path("benchmarks/results/simulate_acceptance.json")


def singles(name: str, k: int) -> Counts:
    """A drafter on responses by themselves."""
    side = next(side for side in sides.all_sides() if side.name == name)
    counts = Counts(EDGES, k)
    for index, length in enumerate(LENGTHS):
        trace = generator.Problem(index, seed=SEED).response(0, length)
        count_replay(side.open(k, 1, length + 400), [trace], counts, k)
    return counts


def siblings(count: int, k: int) -> Counts:
    """Own text and siblings', all siblings advancing together."""
    side = next(side for side in sides.all_sides() if side.name == sides.OWN_SIBLINGS)
    counts = Counts(EDGES, k)
    for index in range(GROUPS):
        traces = generator.group(index, 16, GROUP_LENGTH, SEED)[:count]
        count_replay(side.open(k, count, GROUP_LENGTH + 400), traces, counts, k)
    return counts


def history(k: int) -> Counts:
    """Own text and the response of the epoch before, half of which the new one repeats."""
    side = next(side for side in sides.all_sides() if side.name == sides.OWN_HISTORY)
    counts = Counts(EDGES, k)
    for length in (30_000, 8_000, 8_000, 2_500, 2_500, 2_500):
        first = generator.singles(1, length, SEED + length)
        second = generator.second_epoch(first, SEED + length)
        session = side.open(k, 1, length + 400)
        read_through(session, first, 1)
        count_replay(session, second, counts, k, step=2)
    return counts


def main() -> None:
    """Replay, fit, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="these tables; others stay as recorded")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    replays: dict[str, Callable[[int], Counts]] = {
        FIRST: partial(singles, sides.FIRST),
        OWN: partial(singles, sides.OWN),
        HISTORY: history,
    }
    replays |= {siblings_table(n): partial(siblings, n) for n in SIBLINGS}
    tables = {}
    if arguments.only and arguments.output.exists():
        tables = json.loads(arguments.output.read_text(encoding="utf-8"))["tables"]
    for k in KS:
        for name, replay in replays.items():
            title = f"{name}, k={k}"
            if not arguments.only or title in arguments.only:
                table = replay(k).fit()
                print(title, table.mean_length(k).round(3).tolist(), flush=True)
                tables[title] = table.to_json()
    record = {
        "machine": machine("numpy", "numba"),
        "setting": {"seed": SEED, "lengths": LENGTHS, "groups": GROUPS, "of": GROUP_LENGTH},
        "tables": tables,
    }
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
