"""Records `sam-rollout bench drafter` and its targets, with the rollouts of the tiny model.

    python -m benchmarks.bench_drafter [--quick] [--output benchmarks/results/drafter.json]
    python -m benchmarks.bench_drafter --held-out-seed 23

The second command adds acceptance on texts of another seed to the record, without any timing.

Arctic Inference is measured if it can be imported. It registers itself with vLLM wherever it is
installed, so put it beside the environment, not into it: `uv pip install --no-deps --target DIR
arctic-inference==0.1.1`, then run with `PYTHONPATH=DIR`.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from benchmarks.measuring import RESULTS, parser, read_record, write_record
from sam_rollout.bench import draft_tables, draft_targets, drafts, sides
from sam_rollout.bench.machine import machine
from sam_rollout.bench.traces import read_traces
from sam_rollout.bench.verdicts import show_check

TRACES = RESULTS / "traces"
GENERATED = (drafts.COT, drafts.GROUPS, drafts.REWRITES, drafts.SECOND_EPOCH)  # from a seed
HELD_OUT_SIDES = (sides.OWN, sides.ADAPTIVE, sides.OWN_SIBLINGS, sides.OWN_HISTORY, sides.FIRST,
                  sides.ARCTIC)  # fmt: skip
DIGITS = 4  # significant ones of a recorded figure


def rounded(value: Any) -> Any:
    """JSON values with floats as short as their noise deserves."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def held_out(sizes: drafts.Sizes, seed: int) -> dict[str, Any]:
    """Acceptance alone, of the texts that the seed makes and by the sides of interest."""
    bench = drafts.Bench(sizes, seed=seed, progress=print)
    datasets = [
        replace(data, sides=tuple(name for name in data.sides if name in HELD_OUT_SIDES))
        for data in bench.datasets()
        if data.name in GENERATED
    ]
    acceptance, _ = bench.acceptance(datasets)
    return {
        "machine": {**machine("numpy", "numba"), **sides.versions()},
        "seed": seed,
        "missing": {name: why for name, why in bench.missing.items() if name in HELD_OUT_SIDES},
        "acceptance": acceptance,
    }


def main() -> None:
    """Measure, print, write."""
    options = parser(__doc__, "drafter")
    options.add_argument("--quick", action="store_true", help="fewer and shorter texts")
    options.add_argument("--held-out-seed", type=int, help="only acceptance on texts of this seed")
    arguments = options.parse_args()
    sizes = drafts.QUICK if arguments.quick else drafts.Sizes()
    if arguments.held_out_seed is not None:
        found = rounded(held_out(sizes, arguments.held_out_seed))
        write_record({**read_record(arguments.output), "held_out_seed": found}, arguments.output)
        return
    result = drafts.Bench(sizes, read_traces(TRACES), progress=print).run()
    verdicts = draft_targets.judge(result)
    console = Console(width=140)
    draft_tables.show(result, console)
    show_check(verdicts, console)
    draft_tables.plot(result, arguments.output.with_suffix(".png"))
    record = {**result, "check": [asdict(verdict) for verdict in verdicts]}
    write_record(rounded(record), arguments.output)


if __name__ == "__main__":
    main()
