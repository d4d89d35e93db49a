"""Records what the simulator says of the published setups; no engine needed.

    python -m benchmarks.simulate_published [--output benchmarks/results/simulate_published.json]

What `sam-rollout simulate experiment=NAME` says of each of them, and how long the simulator takes
for a round of many replicas. `sam-rollout simulate --check` holds new predictions against this.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from sam_rollout.bench.machine import machine
from sam_rollout.doctor.experiment import compose
from sam_rollout.simulation import program
from sam_rollout.simulation.policies import budget_of
from sam_rollout.simulation.published import FITTED_SETUP, SETUPS, OnPaper
from sam_rollout.simulation.rollout import Fleet, Setting, simulate

REPLICAS, PROMPTS, SIBLINGS = 1_000, 1_000, 16  # of the round that is timed
TIMED = 3


def _speed(paper: OnPaper) -> dict[str, Any]:
    """Seconds for a round of Qwen3-32B's lengths over many replicas, with drafts."""
    setup = paper.setups[FITTED_SETUP]
    k = setup.sam.max_draft_tokens
    costs = paper.fit.costs(setup, paper.assumed, k)
    setting = Setting(budget_of(setup.sam), (paper.acceptance,))
    round_ = paper.fit.lengths(setup, paper.assumed).draw(PROMPTS, SIBLINGS, seed=0)
    seconds = []
    for _ in range(TIMED):
        started = time.perf_counter()
        simulate(round_, Fleet(REPLICAS, setup.fleet.max_num_seqs), costs, setting)
        seconds.append(time.perf_counter() - started)
    return {
        "replicas": REPLICAS,
        "responses": len(round_),
        "max_response": setup.max_response,
        "median_s": float(np.median(seconds)),
        "all_s": seconds,
    }


def main() -> None:
    """Predict, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=program.PUBLISHED)
    arguments = parser.parse_args()
    about = machine("numpy", "numba", "scipy")
    paper = program.on_paper(lambda name: compose(f"experiment={name}")[0])
    studies = {}
    for name in SETUPS:
        studies[name] = program.study(paper, name).to_json()
        print(f"predicted {name}", flush=True)
    record = {"machine": about, "experiments": studies, "speed": _speed(paper)}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
