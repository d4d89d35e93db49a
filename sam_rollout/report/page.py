"""A comparison as one HTML file that needs no network: what it says, with charts to point at."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sam_rollout.report import fairness, page_charts, run_differences
from sam_rollout.report.compare import Comparison
from sam_rollout.report.comparison_tables import tables
from sam_rollout.report.number_format import interval, number
from sam_rollout.report.panels import SECTIONS
from sam_rollout.report.runs import with_names
from sam_rollout.report.verdict_sentences import sentences

TEMPLATES = Path(__file__).parent / "templates"
_LONGEST_VALUE = 120  # characters of a configuration value


def write_page(comparison: Comparison, path: str | Path) -> None:
    """Writes the page of a comparison."""
    Path(path).write_text(render_page(comparison), encoding="utf-8")


def render_page(comparison: Comparison) -> str:
    """The page of a comparison as text."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "interval": interval, "bracketed": _bracketed}
    return environment.get_template("compare.html.j2").render(
        comparison=comparison,
        sentences=sentences(comparison),
        tiles=[row for key in ("rollout", "tail", "step") if (row := comparison.time(key))],
        unfair=[f for f in comparison.findings if f.severity == fairness.UNFAIR],
        tables=tables(comparison),
        sections=SECTIONS,
        charts=page_charts.charts(comparison),
        extra=page_charts.lengths(comparison),
        config=_config_rows(comparison),
        runs=with_names(comparison.base, comparison.sam),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _bracketed(cell: str) -> Markup:
    """A cell of a table with its interval in small print."""
    value, bracket, rest = cell.partition(" [")
    return escape(value) + (Markup(" <small>[{}</small>").format(rest) if bracket else "")


def _config_rows(comparison: Comparison) -> list[tuple[str, str, str, bool]]:
    """Settings that differ: name, BASE, SAM, whether they may.

    What a run is shown beside is none, nor are places: a page is handed on.
    """
    configs = [side[0].start.config for side in (comparison.base, comparison.sam)]
    everything = [run_differences.in_place(config) for config in configs]
    judged = [run_differences.comparable(config) for config in configs]
    rows = []
    for name, left, right in run_differences.differences(*everything):
        expected = all(name not in side for side in judged) or (
            judged[0].get(name) == judged[1].get(name)
        )
        parts = name.split(".")
        if parts[0] != "compare" and parts[-1] not in {"run_dir", *run_differences.PLACES}:
            rows.append((name, _short(left), _short(right), expected))
    return sorted(rows, key=lambda row: row[3])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
