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
from sam_rollout.report.comparison_tables import Table, markdown, tables
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

    def paths(runs: list[str]) -> list[Path]:
        return [results / RUNS / run for run in runs]

    return {
        name: compare_folders(paths(pair["base"]), paths(pair["sam"]), pair["skip_first"])
        for name, pair in pairs.items()
    }


def check_recorded(root: Path) -> list[str]:
    """What is published and does not follow from the stored runs; empty if all of it does."""
    recorded = load_recorded(root / RESULTS)
    wrong = []
    page = (root / PAGE).read_text(encoding="utf-8")
    for name, table in published(recorded.comparisons).items():
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


def published(comparisons: dict[str, Comparison]) -> dict[str, str]:
    """Markdown tables of the published page, by what they show."""
    fair, unfair = (tables(comparisons[name]) for name in (FAIR, UNFAIR))
    others = {
        f"times and gains of {name}": markdown(tables(one)["gains"])
        for name, one in comparisons.items()
        if name not in (FAIR, UNFAIR)
    }
    return others | {
        "times and gains": markdown(fair["gains"]),
        "samples": markdown(fair["samples"]),
        "figures beside the times": markdown(fair["quantities"]),
        "findings": _findings(comparisons[FAIR]),
        "times and gains of the unfair pair": markdown(unfair["gains"]),
        "findings of the unfair pair": _findings(comparisons[UNFAIR]),
    }


def _findings(comparison: Comparison) -> str:
    rows = [
        (found.severity, found.name.replace("_", " "), found.text)
        for found in comparison.findings
        if found.severity in _SHOWN_FINDINGS
    ]
    head = ("severity", "finding", "what")
    return markdown(Table("Findings", head, rows or [("none", "", "")]))
