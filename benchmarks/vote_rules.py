"""What each rule of the voting brings: acceptance on real responses, one rule changed at a time.

    python -m benchmarks.vote_rules --traces FOLDER [--output benchmarks/results/vote_rules.json]

FOLDER holds the sets that `benchmarks/real_traces.py` rebuilds; the record names their sources.
Replay is greedy; the machine only decides whether a prompt's history is read in time for its first
step. Every variant runs in a process of its own with a copy of the package in which one line
differs, because kernels take constants in when they are compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.calibrate_traces import acceptance
from benchmarks.measuring import REPOSITORY, parser, write_record
from benchmarks.real_traces import SOURCES, read_rebuilt
from sam_rollout.bench import sides
from sam_rollout.bench.machine import machine

K = 3
SIDE = sides.DEFAULT
_VOTES, _POLICY, _POOL = "automaton/continuations.py", "drafting/policy.py", "automaton/pool.py"
_KERNELS = "automaton/kernels.py"
_CLASS = "return (2 * number + is_latest) * WRITERS + writer"


@dataclass(frozen=True)
class Variant:
    """A line of the package, or a part of one that occurs once in its file, and what replaces it.

    `name` is what tables show; without a `file` nothing is replaced.
    """

    name: str
    file: str = ""
    line: str = ""
    instead: str = ""

    def copy_to(self, folder: Path) -> None:
        """Put the package, so changed, into a folder.

        Raises:
            ValueError: the line is not there, or several times.
        """
        package = folder / "sam_rollout"
        shutil.copytree(
            REPOSITORY / "sam_rollout", package, ignore=shutil.ignore_patterns("__pycache__")
        )
        if not self.file:
            return
        changed = package / self.file
        text = changed.read_text(encoding="utf-8")
        if text.count(self.line) != 1:
            raise ValueError(f"{self.name}: {self.file} must hold once: {self.line}")
        changed.write_text(text.replace(self.line, self.instead), encoding="utf-8")


VARIANTS = (
    Variant("as it is"),
    Variant("the longest suffix alone", _VOTES, "LEVELS = 2\n", "LEVELS = 1\n"),
    Variant("three suffixes instead of two", _VOTES, "LEVELS = 2\n", "LEVELS = 3\n"),
    Variant("the most frequent token alone", _VOTES, "if is_latest:", "if True:"),
    Variant("clones vote for the latest token alone", _KERNELS,
            "if token == entry[BEST_TOKEN] or times >= entry[BEST_COUNT]:", "if True:"),
    Variant("no telling whose text it is", _VOTES, _CLASS, _CLASS.removesuffix(" + writer")),
    Variant("no telling how often", _VOTES, _CLASS,
            "return _class_in(length, LENGTHS) * _PER_LENGTH + is_latest * WRITERS + writer"),
    Variant("no telling but the suffix's length", _VOTES, _CLASS,
            "return _class_in(length, LENGTHS) * _PER_LENGTH"),
    Variant("weights that are not learned", _POLICY, "weights[number] = _CHANGED", "pass"),
    Variant("places noted along 8 links instead of 2", _POOL, "MAX_LINK_UPDATES = 2",
            "MAX_LINK_UPDATES = 8"),
)  # fmt: skip


def measure(traces: Path) -> Iterator[tuple[str, float]]:
    """Each set and its tokens per verify step, with the package as this process imports it."""
    for name, texts in read_rebuilt(traces).items():
        yield name, round(acceptance(SIDE, [texts], K).mean_acceptance_length, 4)


def run_variant(variant: Variant, traces: Path) -> Iterator[tuple[str, float]]:
    """`measure` in a process that imports the changed copy.

    Raises:
        subprocess.CalledProcessError: it failed; its error went to the terminal.
    """
    program = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "import sam_rollout\n"
        "assert Path(sam_rollout.__file__).is_relative_to(Path.cwd()), sam_rollout.__file__\n"
        "from benchmarks.vote_rules import measure\n"
        "for found in measure(Path(sys.argv[1])):\n"
        "    print(json.dumps(found), flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(traces.resolve())]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        variant.copy_to(folder)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, *sys.path)))}
        with subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            for line in process.stdout or ():
                if line.startswith("["):  # libraries print, too
                    data, length = json.loads(line)
                    yield data, length
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, variant.name)


def main() -> None:
    """Measure every variant, write."""
    options = parser(__doc__, "vote_rules")
    options.add_argument(
        "--traces", type=Path, required=True, help="sets of benchmarks.real_traces"
    )
    arguments = options.parse_args()
    read_rebuilt(arguments.traces)
    rows: list[dict[str, Any]] = []
    with Progress() as bar:
        task = bar.add_task("", total=len(VARIANTS) * len(SOURCES))
        for variant in VARIANTS:
            bar.update(task, description=variant.name)
            for data, length in run_variant(variant, arguments.traces):
                rows.append(
                    {"variant": variant.name, "data": data, "mean_acceptance_length": length}
                )
                bar.console.print(f"{variant.name:40} {data:15} {length:.3f}")
                bar.advance(task)
    record = {
        "machine": machine("numpy", "numba"),
        "setting": {"side": SIDE, "k": K},
        "sources": {name: source.described() for name, source in SOURCES.items()},
        "rows": rows,
    }
    write_record(record, arguments.output)


if __name__ == "__main__":
    main()
