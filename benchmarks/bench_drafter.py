"""Records `sam-rollout bench drafter` on sets of real responses.

    python -m benchmarks.bench_drafter --traces FOLDER [--output FILE]

FOLDER holds the sets that `benchmarks/real_traces.py` rebuilds; the record names their sources.

Arctic Inference is measured if it can be imported. It registers itself with vLLM wherever it is
installed, so put it beside the environment, not into it, and run with `PYTHONPATH=DIR`. Of 0.3.0
only the suffix trees are needed, and the build of the whole asks for torch. From its unpacked
source distribution, with nanobind 2.9.2 in the environment of PYTHON:

    cmake -S csrc/suffix_decoding -B build -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE=PYTHON
    cmake --build build && cp build/_C*.so arctic_inference/suffix_decoding
    mkdir DIR && cp -r arctic_inference arctic_inference.egg-info DIR
    rm DIR/arctic_inference.egg-info/entry_points.txt
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.measuring import parser, write_record
from benchmarks.real_traces import SOURCES, read_rebuilt
from sam_rollout.bench import draft_tables, drafter_bench

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
    options = parser(__doc__, "drafter")
    options.add_argument(
        "--traces", type=Path, required=True, help="sets of benchmarks.real_traces"
    )
    arguments = options.parse_args()
    sets = read_rebuilt(arguments.traces)
    result = drafter_bench.Bench(sets, progress=print).run()
    for one in result["sets"]:
        if source := SOURCES.get(one["name"]):
            one["source"] = source.described()
    draft_tables.show(result, Console(width=140))
    write_record(rounded(result), arguments.output)


if __name__ == "__main__":
    main()
