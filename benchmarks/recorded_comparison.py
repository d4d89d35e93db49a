"""Repeats the comparison of results/compare_tiny_cpu.md with the runs stored in the repository."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sam_rollout.report import fairness
from sam_rollout.report.compare import Comparison, compare_folders
from sam_rollout.report.comparison_tables import Table, markdown, tables

RESULTS = Path("benchmarks/results")
RECORD = "compare_tiny_cpu.json"
SIDES_PICTURE = "compare_tiny_cpu_sides.png"
RUNS = "runs"
FAIR, UNFAIR = "fair", "unfair"  # names of the record's two comparisons


@dataclass(frozen=True)
class Recorded:
    content: dict[str, Any]
    comparisons: dict[str, Comparison]


def load_recorded(results: Path) -> Recorded:
    content = json.loads((results / RECORD).read_text(encoding="utf-8"))
    return Recorded(content, compare_recorded(results, content["pairs"]))


def compare_recorded(results: Path, pairs: dict[str, Any]) -> dict[str, Comparison]:
    """Compare the runs of all pairs.

    `pairs` maps the name of each pair to a dict. The keys `base` and `sam` have lists of run names,
    and `skip_first` has the number of first steps to leave out.
    """
    runs = results / RUNS
    return {
        name: compare_folders(
            *([runs / run for run in pair[side]] for side in ("base", "sam")), pair["skip_first"]
        )
        for name, pair in pairs.items()
    }


def published(comparisons: dict[str, Comparison]) -> dict[str, str]:
    """Return the Markdown tables of the published page; the keys name their contents."""
    fair, unfair = (tables(comparisons[name]) for name in (FAIR, UNFAIR))
    return {
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
        if found.severity in (fairness.UNFAIR, fairness.WARNING)
    ]
    head = ("severity", "finding", "what")
    return markdown(Table("Findings", head, rows or [("none", "", "")]))
