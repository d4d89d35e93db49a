"""Writes docs/results.md from the recorded results, so that no number is copied by hand.

    python -m benchmarks.results_page [--check]

``results_sections`` holds a template for each record below ``results``: its words and tables. The
table of drafters in each README gets its figures, too; its words stay.
``--check`` exits with 1 if a page on disk is not what the records say.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.measuring import REPOSITORY, RESULTS, read_record
from benchmarks.real_traces import SOURCES
from recipes.dapo_qwen3 import published_setups
from sam_rollout.bench import sides
from sam_rollout.bench.draft_tables import pivot
from sam_rollout.report.compare import TimeRow
from sam_rollout.report.recorded import SIDES_PICTURE, load_recorded, published

PAGE = REPOSITORY / "docs" / "results.md"
# Each README, and what it says where nothing was measured.
READMES = {REPOSITORY / "README.md": "not measured", REPOSITORY / "README_zh.md": "未测"}
# The READMEs' table of drafters: its rows, and what its figures are measured at.
README_SIDES = (sides.OWN, sides.OWN_SIBLINGS, sides.DEFAULT, sides.NGRAM_24,
                sides.ARCTIC_4, sides.FIRST)  # fmt: skip
README_K, README_CONTEXT, README_BATCHES = 3, 32_768, (32, 128)
TEMPLATES = REPOSITORY / "benchmarks" / "results_sections"

INTRODUCTION = """# Results

Every table is written from a record under `benchmarks/results` by `python -m
benchmarks.results_page`; the command above a table makes its record again. All of it ran on two
shared CPU cores with the tiny Qwen3: what is shown is that the road works and where time goes.
Nothing here predicts a cluster; no GPU and no NPU was used. What our experiments repeat from
publications is at the end: [published setups](#published-setups).
"""

PUBLISHED = """## Published setups

`python -m recipes.dapo_qwen3.published_setups`

Which value was published where, and which key of ours holds it: [value by
value](published_setups.md). None of these setups has been run here, there was no NPU at hand; a
test composes the experiments and compares."""

# Records below benchmarks/results in the order of their sections.
RECORDS = (
    "rollout_tiny_cpu", "rollout_models_tiny_cpu", "compare_tiny_cpu", "learning_tiny_cpu",
    "trajectories_tiny_cpu", "evaluate_tiny_cpu", "arbitrage_tiny_cpu",
    "operators_tiny_cpu", "sampler", "drafter", "gate",
    "device_idle", "model_drafts_tiny_cpu", "head_training_tiny_cpu",
    "head_online_tiny_cpu",
)  # fmt: skip


def _machine(record: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in record["machine"].items())


def _spread(cell: dict[str, float] | None, low: str, high: str, median: str = "median") -> str:
    if cell is None:
        return ""
    if cell[low] is None:  # of a single round
        return _figure(cell[median])
    middle, first, last = (_figure(cell[name]) for name in (median, low, high))
    return f"{middle} [{first}, {last}]"


def _ratio(cell: dict[str, float] | None) -> str:
    """With the interval of the median, or with quartiles in records that have none."""
    ends = ("low", "high") if cell and "low" in cell else ("q1", "q3")
    return _spread(cell, *ends)


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _least_identical(record: dict[str, Any]) -> float:
    """Share of responses that equal the base side's, in the round and side where it is least."""
    return min(side["identical"] for one in record["rounds"] for side in one.values())


def _raw_and_equal(row: TimeRow | None) -> str:
    """What equal tokens leave of a row's gain; nothing where it has not both."""
    if row is None or row.raw is None or row.equal_tokens is None:
        return ""
    raw, equal = (gain.speed_up_minus_one.value for gain in (row.raw, row.equal_tokens))
    return f"The gain of its {row.title} is {raw:+.1%} raw, {equal:+.1%} at equal tokens. "


def over(rows: Sequence[Mapping[str, Any]], mode: str, other: str) -> list[tuple[float, float]]:
    """Share of target steps at a mode's points, and accuracy there less that of another mode.

    The other one is interpolated between its own points and those of both models alone.
    """
    known = sorted(
        (row["target_share"], row["accuracy"]["value"])
        for row in rows
        if row["mode"] in (other, "draft", "target")
    )
    return [
        (share, row["accuracy"]["value"] - float(np.interp(share, *zip(*known, strict=True))))
        for row in rows
        if row["mode"] == mode
        for share in [row["target_share"]]
    ]


def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "fmt": format,
        "least_identical": _least_identical,
        "machine": _machine,
        "median": statistics.median,
        "over": over,
        "ratio": _ratio,
        "spread": _spread,
    }
    environment.tests["search"] = lambda text, part: part in text
    environment.globals |= {
        "pivot": pivot,
        "raw_and_equal": _raw_and_equal,
        "sides_picture": SIDES_PICTURE,
    }
    return environment


def section(name: str, record: dict[str, Any]) -> str:
    """The section of a record; paragraphs that its template wraps are one line each."""
    given: dict[str, Any] = {"record": record, "setting": record.get("setting")}
    if "machine" in record:
        given["machine"] = _machine(record)
    if name == "compare_tiny_cpu":
        recorded = load_recorded(RESULTS)
        given |= {"recorded": recorded, "tables": published(recorded.comparisons)}
    parts = _templates().get_template(f"{name}.md.j2").render(given).strip().split("\n\n")
    return "\n\n".join(
        part if part.startswith(("|", "```")) else part.replace("\n", " ") for part in parts
    )


def render() -> str:
    """The whole page."""
    records = {name: read_record(RESULTS / f"{name}.json") for name in RECORDS}
    sections = [section(name, record) for name, record in records.items() if record]
    if missing := [name for name, record in records.items() if not record]:
        sections.append(f"## Not measured yet\n\n{', '.join(missing)}")
    sections.append(f"{PUBLISHED}\n\n{published_setups.summary()}")
    return "\n\n".join([INTRODUCTION.rstrip(), *sections]) + "\n"


def drafter_figures(record: dict[str, Any]) -> list[list[str | None]]:
    """Figures of the READMEs' table of drafters, row by row; None where there is none."""
    figures = {
        (row["data"], row["side"]): f"{row['mean_acceptance_length']:.2f}"
        for row in record.get("acceptance", ())
        if row["k"] == README_K
    } | {
        (row["rows"], row["side"]): f"{row['median_us'] / 1000:.2f}"
        for row in record.get("calls", ())
        if row["context"] == README_CONTEXT
    }
    columns = (*SOURCES, *README_BATCHES)
    return [[figures.get((column, side)) for column in columns] for side in README_SIDES]


def refilled(readme: str, figures: list[list[str | None]], otherwise: str) -> str:
    """A README with these figures in its table of drafters."""
    lines = readme.split("\n")
    first = next(i for i, line in enumerate(lines) if line.startswith("| drafter |")) + 2
    for at, row in enumerate(figures, start=first):
        cells = lines[at].split(" | ")
        cells[2 : 2 + len(row)] = [figure or otherwise for figure in row]
        lines[at] = " | ".join(cells)
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    """Every page with figures, as the records would have it."""
    figures = drafter_figures(read_record(RESULTS / "drafter.json"))
    readmes = {
        path: refilled(path.read_text(encoding="utf-8"), figures, otherwise)
        for path, otherwise in READMES.items()
    }
    return {PAGE: render(), **readmes}


def main() -> None:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for path, text in pages().items():
        if not arguments.check:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            sys.exit(
                f"{path.relative_to(REPOSITORY)} does not follow from benchmarks/results: run "
                "python -m benchmarks.results_page"
            )


if __name__ == "__main__":
    main()
