"""The comparison this repository publishes, made again from the runs that are stored with it.

`benchmarks/dapo_ab.py` stores the light part of its runs and a record that names them; the tables
of docs/results.md are written from what is compared here, and `sam-rollout compare --check` holds
the page against it.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sam_rollout.report import fairness
from sam_rollout.report.compare import Comparison, compare_folders
from sam_rollout.report.tables import number
from sam_rollout.statistics import Estimate, Gain
from sam_rollout.telemetry.records import RunFolderError

RESULTS = Path("benchmarks/results")
RECORD = "compare_tiny_cpu.json"
SIDES_PICTURE = "compare_tiny_cpu_sides.png"
RUNS = "runs"
PAGE = Path("docs/results.md")
FAIR, UNFAIR = "fair", "unfair"  # the two comparisons of the record
_STORED = ("times", "quantities", "findings")  # parts of a stored comparison that are checked
_TOLERANCE = 1e-6  # relative, of their figures: another machine adds up in another order
_SHOWN_FINDINGS = (fairness.UNFAIR, fairness.WARNING)


@dataclass(frozen=True)
class Recorded:
    """The record as stored, and its two comparisons made again."""

    content: dict[str, Any]
    comparisons: dict[str, Comparison]


def load_recorded(results: Path) -> Recorded:
    """Reads the record below `results` and compares its runs; raises RunFolderError without it."""
    path = results / RECORD
    if not path.is_file():
        raise RunFolderError(
            f"no file {path}: run in the repository's root; python -m benchmarks.dapo_ab records it"
        )
    content = json.loads(path.read_text(encoding="utf-8"))
    return Recorded(content, compare_recorded(results, content["pairs"]))


def compare_recorded(results: Path, pairs: dict[str, Any]) -> dict[str, Comparison]:
    """The comparisons that `pairs` describes: name -> {base, sam: names of runs, skip_first}."""
    return {
        name: compare_folders(
            *([results / RUNS / run for run in pair[side]] for side in ("base", "sam")),
            pair["skip_first"],
        )
        for name, pair in pairs.items()
    }


def check_recorded(root: Path) -> list[str]:
    """What is published and does not follow from the stored runs; empty if all of it does."""
    recorded = load_recorded(root / RESULTS)
    wrong = []
    page = (root / PAGE).read_text(encoding="utf-8")
    for name, table in tables(recorded.comparisons).items():
        if table not in page:
            wrong.append(
                f"{PAGE}: the table of {name} does not follow from the runs in {RESULTS / RUNS}: "
                "run python -m benchmarks.results_page"
            )
    for name, comparison in recorded.comparisons.items():
        stored = recorded.content["comparisons"][name]
        if comparison.fair != stored["fair"]:
            wrong.append(
                f"{RESULTS / RECORD}: fair is {stored['fair']} for the {name} pair, its runs say "
                f"{comparison.fair}"
            )
        wrong += _changed_figures(name, stored, comparison)
    if recorded.comparisons[UNFAIR].fair is not False:
        wrong.append("the unfair pair is not flagged as unfair")
    return wrong


def _changed_figures(name: str, stored: dict[str, Any], comparison: Comparison) -> Iterator[str]:
    made = json.loads(json.dumps(comparison.to_dict()))
    for part in _STORED:
        changed = list(_differences(part, stored[part], made[part]))
        if changed:
            where, left, right = changed[0]
            yield (
                f"{RESULTS / RECORD}: {len(changed)} figure(s) of the {name} pair do not follow "
                f"from its runs, first {where}: {left} stored, {right} computed"
            )


def _differences(where: str, stored: Any, made: Any) -> Iterator[tuple[str, Any, Any]]:
    """Place and both values of whatever differs in two trees of plain values."""
    if isinstance(stored, dict) and isinstance(made, dict) and stored.keys() == made.keys():
        for name in stored:
            yield from _differences(f"{where}.{name}", stored[name], made[name])
    elif isinstance(stored, list) and isinstance(made, list) and len(stored) == len(made):
        for place, pair in enumerate(zip(stored, made, strict=True)):
            yield from _differences(f"{where}[{place}]", *pair)
    elif isinstance(stored, float) and isinstance(made, float):
        if not math.isclose(stored, made, rel_tol=_TOLERANCE, abs_tol=1e-12):
            yield where, stored, made
    elif stored != made:
        yield where, stored, made


def tables(comparisons: dict[str, Comparison]) -> dict[str, str]:
    """Markdown tables of the published page, by what they show."""
    fair, unfair = comparisons[FAIR], comparisons[UNFAIR]
    return {
        "times and gains": _gains(fair),
        "samples": _samples(fair),
        "figures beside the times": _quantities(fair),
        "findings": _findings(fair),
        "times and gains of the unfair pair": _gains(unfair),
        "findings of the unfair pair": _findings(unfair),
    }


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _gains(comparison: Comparison) -> str:
    head = ["per step", "BASE, s", "SAM, s", "gain, raw", "gain, equal tokens", "time saved, raw"]
    rows = [
        [
            row.title,
            number(row.base.per_step),
            number(row.sam.per_step),
            _gain(row.raw),
            _gain(row.equal_tokens),
            f"{row.raw.time_saved.value:+.1%}" if row.raw else "-",
        ]
        for row in comparison.times
    ]
    return _table(head, rows)


def _gain(gain: Gain | None) -> str:
    if gain is None:
        return "-"
    estimate = gain.speed_up_minus_one
    return f"{estimate.value:+.1%}{_interval(estimate, 100, '+.1f')}"


def _interval(estimate: Estimate, factor: float, form: str) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f" [{factor * estimate.low:{form}}, {factor * estimate.high:{form}}]"


def _samples(comparison: Comparison) -> str:
    lossless = comparison.lossless
    rows = [
        [
            " / ".join(pair.runs),
            pair.by,
            f"{pair.identical:,} of {pair.matched:,}",
            str(pair.unmatched),
        ]
        for pair in (*lossless.pairs, *lossless.controls)
    ]
    return _table(["runs", "compared by", "the same responses", "without partner"], rows)


def _quantities(comparison: Comparison) -> str:
    rows = [
        [
            row.title,
            number(row.base.median),
            number(row.sam.median),
            f"{number(row.difference.value, '+')}{_interval(row.difference, 1, '+.3g')}",
        ]
        for row in comparison.quantities
    ]
    return _table(["per step", "BASE, median", "SAM, median", "mean SAM - BASE [95 %]"], rows)


def _findings(comparison: Comparison) -> str:
    rows = [
        [found.severity, found.name.replace("_", " "), found.text.replace("|", "\\|")]
        for found in comparison.findings
        if found.severity in _SHOWN_FINDINGS
    ]
    return _table(["severity", "finding", "what"], rows or [["none", "", ""]])
