"""Records `sam-rollout bench drafter` and its targets, with the rollouts of the tiny model.

    python -m benchmarks.drafter [--quick] [--output benchmarks/results/drafter.json]
    python -m benchmarks.drafter --held-out-seed 23

The second command adds acceptance on texts of another seed to the record, without any timing.

Arctic Inference is measured if it can be imported. It registers itself with vLLM wherever it is
installed, so put it beside the environment, not into it: `uv pip install --no-deps --target DIR
arctic-inference==0.1.1`, then run with `PYTHONPATH=DIR`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from sam_rollout.bench import drafter, drafter_check, drafter_report
from sam_rollout.bench.traces import read_traces
from sam_rollout.bench.verdicts import show_check

TRACES = Path("benchmarks/results/traces")
DIGITS = 4  # significant ones of a recorded figure


def rounded(value: Any) -> Any:
    """JSON values with floats as short as their noise deserves."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    return [rounded(one) for one in value] if isinstance(value, list | tuple) else value


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter texts")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/drafter.json"))
    parser.add_argument("--held-out-seed", type=int, help="only acceptance on texts of this seed")
    arguments = parser.parse_args()
    sizes = drafter.QUICK if arguments.quick else drafter.Sizes()
    if arguments.held_out_seed is not None:
        held_out = drafter.Bench(sizes, seed=arguments.held_out_seed, progress=print).held_out()
        record = json.loads(arguments.output.read_text(encoding="utf-8"))
        _write({**record, "held_out_seed": rounded(held_out)}, arguments.output)
        return
    result = drafter.Bench(sizes, read_traces(TRACES), progress=print).run()
    verdicts = drafter_check.judge(result)
    console = Console(width=140)
    drafter_report.show(result, console)
    show_check(verdicts, console)
    drafter_report.plot(result, arguments.output.with_suffix(".png"))
    record = {**result, "check": [asdict(verdict) for verdict in verdicts]}
    _write(rounded(record), arguments.output)


def _write(record: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
