"""Writes docs/results.md and a page of tables for each record.

    python -m benchmarks.results_page

The folder ``results_sections`` has a template for each record in ``results``. The template of
docs/results.md is ``verdicts.md.j2``.
"""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.measuring import REPOSITORY, RESULTS, read_record
from benchmarks.real_traces import SOURCES
from benchmarks.recorded_comparison import SIDES_PICTURE, load_recorded, published
from sam_rollout.bench import sides
from sam_rollout.bench.drafter_bench import pivot
from sam_rollout.report.compare import TimeRow

PAGE, VERDICTS = REPOSITORY / "docs" / "results.md", "verdicts"
SECTIONS = REPOSITORY / "benchmarks" / "results_sections"


def _spread(cell: dict[str, float] | None, low: str, high: str, median: str = "median") -> str:
    if cell is None:
        return ""
    if cell[low] is None:  # a single round has no interval
        return _figure(cell[median])
    middle, first, last = (_figure(cell[name]) for name in (median, low, high))
    return f"{middle} [{first}, {last}]"


def _ratio(cell: dict[str, float] | None) -> str:
    """Format a median with its interval, or with quartiles in records without intervals."""
    return _spread(cell, *(("low", "high") if cell and "low" in cell else ("q1", "q3")))


def _figure(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def _raw_and_equal(row: TimeRow | None) -> str:
    """Return a sentence with a row's raw gain and its gain at equal tokens, if the row has both."""
    if row is None or row.raw is None or row.equal_tokens is None:
        return ""
    raw, equal = (gain.speed_up_minus_one.value for gain in (row.raw, row.equal_tokens))
    return f"The gain of its {row.title} is {raw:+.1%} raw, {equal:+.1%} at equal tokens. "


def over(rows: Sequence[Mapping[str, Any]], mode: str, other: str) -> list[tuple[float, float]]:
    """Return a mode's points (target's share of steps, gain in accuracy over the mode `other`).

    The accuracy of `other` at the same share is interpolated between the points of `other` and of
    the modes `draft` and `target`.
    """
    points = [(row["mode"], row["target_share"], row["accuracy"]["value"]) for row in rows]
    known = zip(*sorted(one[1:] for one in points if one[0] in (other, "draft", "target")),
                strict=True)  # fmt: skip
    shares, accuracies = map(list, known)
    return [
        (share, accuracy - float(np.interp(share, shares, accuracies)))
        for name, share, accuracy in points
        if name == mode
    ]


def _factor(gain: dict[str, Any]) -> str:
    faster = gain["speed_up_minus_one"]
    value, low, high = (f"{1 + faster[name]:.2f}" for name in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _render(name: str, **given: Any) -> str:
    """Fill in a template; each wrapped paragraph becomes one line."""
    environment = Environment(
        loader=FileSystemLoader(SECTIONS), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "factor": _factor, "fmt": format, "median": statistics.median, "over": over,
        "ratio": _ratio, "spread": _spread,
    }  # fmt: skip
    environment.tests["search"] = lambda text, part: part in text
    parts = environment.get_template(f"{name}.md.j2").render(given).strip().split("\n\n")
    return "\n\n".join(
        part if part.startswith(("|", "```", "* ")) else part.replace("\n", " ")
        for part in map(str.strip, parts)
        if part
    )


def section(name: str, record: dict[str, Any]) -> str:
    """Return the tables of a record as Markdown."""
    given: dict[str, Any] = {
        "record": record, "setting": record.get("setting"), "pivot": pivot,
        "raw_and_equal": _raw_and_equal, "sources": SOURCES, "sides_picture": SIDES_PICTURE,
        "machine": ", ".join(f"{what} {value}" for what, value in record["machine"].items()),
    }  # fmt: skip
    if name == "compare_tiny_cpu":
        recorded = load_recorded(RESULTS)
        given |= {"recorded": recorded, "tables": published(recorded.comparisons)}
    return _render(name, **given)


def render() -> dict[Path, str]:
    """Return file -> page for docs/results.md and for each record that exists."""
    names = {path.name.removesuffix(".md.j2") for path in SECTIONS.iterdir()} - {VERDICTS}
    records = {name: read_record(RESULTS / f"{name}.json") for name in sorted(names)}
    pages = {PAGE: _render(VERDICTS, record=records, sides=sides, sources=SOURCES)} | {
        RESULTS / f"{name}.md": section(name, record) for name, record in records.items() if record
    }
    return {path: f"{text}\n" for path, text in pages.items()}


if __name__ == "__main__":
    for page, text in render().items():
        page.write_text(text, encoding="utf-8")
