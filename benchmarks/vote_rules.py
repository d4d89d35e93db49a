"""What each part of the voting brings: acceptance on real texts with one part changed at a time.

    python -m benchmarks.vote_rules --traces SETS [--output benchmarks/results/vote_rules.json]

SETS are those of benchmarks.real_traces. Replay is greedy and does not depend on the machine. Every
variant runs in a process of its own, because kernels take constants in when they are compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measuring import parser, write_record
from benchmarks.real_traces import SOURCES
from sam_rollout.bench import sides
from sam_rollout.bench.machine import machine
from sam_rollout.bench.traces import read_sets

K = 3
# In words, and what is done before anything is compiled; `votes` is sam_rollout.automaton's
# continuations, `policy` sam_rollout.drafting's, `pool` sam_rollout.automaton's.
VARIANTS = {
    "as it is": "",
    "the longest suffix alone": "votes.LEVELS = 1",
    "three suffixes": "votes.LEVELS = 3",
    "the most frequent token alone": "votes.VOTES_PER_LEVEL = 1",
    "no telling whose text it is": "votes._writer = njit(lambda states, target, text: 0)",
    "no telling how often": "votes.COUNTS, votes.SHARES = (), ()",
    "weights that are not learned": "policy._FIRST_WEIGHT = 1e12",
    "ends noted along 24 links instead of 8": "pool.MAX_LINK_UPDATES = 24",
}
MEASURED = (sides.OWN, sides.OWN_SIBLINGS, sides.DEFAULT)


def measure(traces: Path) -> dict[str, dict[str, float]]:
    """Tokens per verify step of every set and side, with what this process has changed."""
    from sam_rollout.bench.drafts import Data, accept, run_of

    found: dict[str, dict[str, float]] = {}
    there, _ = sides.available()
    for name, one in read_sets([traces]).items():
        data = Data(name, MEASURED, [run_of(one)], generated=False)
        found[name] = {
            side: round(accept(there[side], data, K).mean_acceptance_length, 4) for side in MEASURED
        }
    return found


def run_variant(change: str, traces: Path) -> dict[str, dict[str, float]]:
    """`measure` in a process that makes a change first."""
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from numba import njit\n"
        "from sam_rollout.automaton import continuations as votes, pool\n"
        f"{change if 'policy' not in change else ''}\n"
        "from sam_rollout.drafting import policy\n"
        f"{change if 'policy' in change else ''}\n"
        "from benchmarks.vote_rules import measure\n"
        "print(json.dumps(measure(Path(sys.argv[1]))))\n"
    )
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-c", program, str(traces)],
            env={**os.environ, "NUMBA_CACHE_DIR": cache},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
            timeout=1200,
        )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure every variant, print, write."""
    options = parser(__doc__, "vote_rules")
    options.add_argument("--traces", type=Path, required=True)
    arguments = options.parse_args()
    rows: list[dict[str, Any]] = []
    for variant, change in VARIANTS.items():
        for name, found in run_variant(change, arguments.traces).items():
            rows += [
                {"variant": variant, "data": name, "side": side, "mean_acceptance_length": length}
                for side, length in found.items()
            ]
            print(f"{variant:40} {name:15} {found}", flush=True)
    record = {
        "machine": machine("numpy", "numba"),
        "setting": {"k": K},
        "sources": {name: source.described() for name, source in SOURCES.items()},
        "rows": rows,
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
