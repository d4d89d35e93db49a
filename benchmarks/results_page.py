"""Writes docs/results.md from the recorded results, so that no number is copied by hand.

    python -m benchmarks.results_page [--check]

``--check`` exits with 1 if the page on disk is not what the records say.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import dapo_ab, rollout

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
PAGE = REPOSITORY / "docs" / "results.md"

INTRODUCTION = """# Results

Every table is written from a record under `benchmarks/results` by `python -m
benchmarks.results_page`; the command above a table makes its record again. All of it ran on two
shared CPU cores with the tiny Qwen3: what is shown is that the road works and where time goes.
Nothing here predicts a cluster; no GPU and no NPU was used.
"""


def _load(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _machine(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record["machine"].items())


def _section(title: str, command: str, record: dict[str, Any], *parts: str) -> str:
    head = f"## {title}\n\n`{command}`\n\n{_machine(record)}"
    return "\n\n".join([head, *parts])


def _spread(cell: dict[str, float] | None, low: str, high: str) -> str:
    if cell is None:
        return ""
    return f"{cell['median']:.3g} [{cell[low]:.3g}, {cell[high]:.3g}]"


def rollout_section() -> str:
    """One rollout, four ways."""
    record = _load("rollout_tiny_cpu")
    columns = (*rollout.sides(), *(f"{base}/{side}" for base, side in rollout.RATIOS))
    rows = [
        [f"{title}, {unit}"]
        + [_spread(record["summary"][metric].get(column), "q1", "q3") for column in columns]
        for metric, title, unit in rollout.FIGURES
    ]
    setting = record["setting"]
    text = (
        f"{setting['prompts']} prompts with {setting['siblings']} responses each, T = 1, at most "
        f"{setting['max_tokens']} tokens, {setting['repeats']} rounds in which the four engines "
        "take turns; median and quartiles over rounds. `stock` is the engine without us, `off` the "
        "same with the coupled sampler, `matched` our path with a gate that never opens (it gives "
        f"up asynchronous scheduling), `on` drafts while at most {setting['tail_threshold']} "
        "requests run. All but `stock` sample the same texts."
    )
    return _section(
        "One rollout, four ways",
        "python -m benchmarks.rollout",
        record,
        text,
        _table(["figure", *columns], rows),
    )


def dapo_section() -> str:
    """Whole DAPO runs, off and on."""
    record = _load("dapo_ab_tiny_cpu")
    columns = (*dapo_ab.SIDES, "off/on")
    same, total = dapo_ab.totals(record["identical_responses"])
    rows = [
        [f"{title}, {unit}".rstrip(", ")]
        + [_spread(record["summary"][metric].get(column), "low", "high") for column in columns]
        for metric, title, unit in dapo_ab.FIGURES
    ]
    setting = record["setting"]
    text = (
        f"{setting['repeats']} runs of each side, alternating, {setting['steps']} training steps "
        "each, the first left out of the times. Median over runs of each run's median step, with the "
        "lowest and highest run. Both sides sample with the coupled sampler: "
        f"{same} of {total} responses are identical token for token."
    )
    picture = "![the first pair of runs](../benchmarks/results/dapo_ab_tiny_cpu.png)"
    return _section(
        "Whole DAPO runs",
        "python -m benchmarks.dapo_ab",
        record,
        text,
        _table(["figure", *columns], rows) + f"\n\n{picture}",
    )


def learning_section() -> str:
    """Accuracy over a run with SAM on."""
    record = _load("learning_tiny_cpu")
    rows = [
        [
            row["title"],
            f"{row['first']:.1%}",
            f"{row['last']:.1%}",
            f"{row['difference']:+.1%} [{row['welch_low']:+.1%}, {row['welch_high']:+.1%}]",
            f"{row['p_value']:.1g}",
        ]
        for row in record["result"]
    ]
    text = (
        f"{len(record['steps'])} DAPO steps with SAM on, validated after every other step on "
        f"{record['held_out_problems']} held-out problems. First and last five values, difference "
        "with its 95 % interval (Welch)."
    )
    picture = "![accuracy over the run](../benchmarks/results/learning_tiny_cpu.png)"
    return _section(
        "Learning",
        "python -m benchmarks.learning",
        record,
        text,
        _table(["accuracy", "first five", "last five", "difference", "p"], rows),
        picture,
    )


def drafter_section() -> str:
    """What drafting costs by itself."""
    record = _load("drafter")
    rows = [
        [str(row["batch"]), str(row["context"]), f"{row['open_us']:.1f}", f"{row['closed_us']:.1f}",
         f"{row['build_ns_per_token']:.0f}", f"{row['bytes_per_token']:.0f}"]
        for row in record["steps"]
    ]  # fmt: skip
    head = ["requests", "context", "gate open, us a step", "gate closed, us a step",
            "build, ns a token", "memory, bytes a token"]  # fmt: skip
    return _section(
        "The drafter alone",
        "python -m benchmarks.drafter",
        record,
        f"k = {record['k']}, two new tokens a request and step, median.",
        _table(head, rows),
    )


# Record below benchmarks/results -> the section that shows it.
SECTIONS = {
    "rollout_tiny_cpu": rollout_section,
    "dapo_ab_tiny_cpu": dapo_section,
    "learning_tiny_cpu": learning_section,
    "drafter": drafter_section,
}


def render() -> str:
    """The whole page."""
    recorded = [write() for name, write in SECTIONS.items() if (RESULTS / f"{name}.json").exists()]
    missing = [name for name in SECTIONS if not (RESULTS / f"{name}.json").exists()]
    if missing:
        recorded.append(f"## Not measured yet\n\n{', '.join(missing)}")
    return "\n\n".join([INTRODUCTION.rstrip(), *recorded]) + "\n"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if not arguments.check:
        PAGE.write_text(render(), encoding="utf-8")
    elif PAGE.read_text(encoding="utf-8") != render():
        sys.exit(
            "docs/results.md does not follow from benchmarks/results: run "
            "python -m benchmarks.results_page"
        )


if __name__ == "__main__":
    main()
