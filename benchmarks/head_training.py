"""What an EAGLE-3 head learns from recorded texts, and how long `sam-rollout head train` takes.

    python -m benchmarks.head_training [--check] [--output FILE]

The texts are recorded responses of the tiny model at temperature 1, one prompt in six held out with
all its responses. Two trainings, each one command from texts to a head: a short
one, of about two minutes on two idle cores, and the default one. Acceptance is by draft position,
over all positions of the held-out responses; a verify step yields its bonus token, too. Updates are
fixed, not minutes: what is learned then does not depend on how busy the machine is.

``--check`` makes the short training again, holds it against `FLOORS`, and what was recorded of
training beside a run against `TARGETS`; it exits with 1 where something falls short.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measuring import MODEL, RESULTS, parser, read_record, write_record
from sam_rollout.bench.machine import machine

TEXTS = RESULTS / "traces" / "tiny_qwen3.parquet"
SHORT, WHOLE = 500, 1500  # updates; WHOLE are the command's default
THREADS = 2
# Least acceptance by position: what a whole training is asked for. The short one gets there, too.
FLOORS = tuple(round(0.95 * chance, 4) for chance in (0.83, 0.81, 0.80))
MINUTES = 10  # at most, for the whole training
ONLINE = RESULTS / "head_online_tiny_cpu.json"
# Training beside a run: row of the record `ONLINE`, figure, least value.
TARGETS = (
    ("trained", "mean_against_frozen", 1.0),
    ("trained", "joined_against_texts", 1.1),
    ("trained", "budget_to_spare", 0.0),
    ("from nothing", "joined_against_texts", 1.0),
    ("from nothing", "budget_to_spare", 0.0),
    ("from nothing with open gate", "joined_against_texts", 1.1),
    ("by default", "budget_to_spare", 0.0),
    ("all sides", "identical", 1.0),
    ("all sides", "same_updates", 1.0),
)


def train(updates: int) -> dict[str, Any]:
    """Run the command; its held-out figures, and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(
            [
                sys.executable, "-m", "sam_rollout.cli", "head", "train", "--model", MODEL,
                "--traces", TEXTS, "--output", folder, "--updates", str(updates),
            ],
            check=True, env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
        )  # fmt: skip
        wall_s = time.monotonic() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        record = json.loads(Path(folder, "training.json").read_text(encoding="utf-8"))
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = {"wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1)}
    return {**record["held_out"][-1], **record["texts"], **took}


def verdict(name: str, value: float, least: float) -> int:
    """Print whether a figure is reached; 1 if not."""
    missed = value < least
    print(f"{'MISSED' if missed else 'met   '} {name}: {value:.3f}, at least {least:.3f}")
    return int(missed)


def check(row: dict[str, Any]) -> int:
    """How many positions fall short of their floor."""
    chances = zip(row["per_position"], FLOORS, strict=True)
    return sum(
        verdict(f"{row['updates']} updates, acceptance of draft {number}", chance, least)
        for number, (chance, least) in enumerate(chances, start=1)
    )


def check_online() -> int:
    """How many targets the record of training beside a run misses; none while there is none."""
    rows = {row["row"]: row for row in read_record(ONLINE).get("rows", ())}
    return sum(
        verdict(f"{row}, {key}", rows[row][key], least) for row, key, least in TARGETS if rows
    )


def main() -> None:
    """Measure, and write the record or check the targets."""
    options = parser(__doc__, "head_training_tiny_cpu")
    options.add_argument("--check", action="store_true")
    arguments = options.parse_args()
    short = train(SHORT)
    missed = check(short)
    if arguments.check:
        sys.exit(1 if missed + check_online() else 0)
    whole = train(WHOLE)
    missed += check(whole) + verdict("minutes to spare", MINUTES - whole["wall_s"] / 60, 0)
    setting = {"threads": THREADS, "floors": FLOORS, "minutes": MINUTES}
    about = machine("torch", "transformers")
    write_record({"machine": about, "setting": setting, "rows": [short, whole]}, arguments.output)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
