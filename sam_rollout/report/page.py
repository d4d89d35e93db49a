"""Writes a comparison as an HTML file, which has interactive charts and needs no network."""

from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from sam_rollout.report import page_charts
from sam_rollout.report.compare import Comparison, interval, number
from sam_rollout.report.comparison_tables import tables
from sam_rollout.report.panels import SECTIONS
from sam_rollout.report.verdict_sentences import sentences

TEMPLATES = Path(__file__).parent / "templates"


def write_page(comparison: Comparison, path: str | Path) -> None:
    """Write the page of a comparison."""
    Path(path).write_text(render_page(comparison), encoding="utf-8")


def render_page(comparison: Comparison) -> str:
    """Return the page of a comparison as HTML."""
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
        tiles=[row for key in ("rollout", "tail", "step") if (row := comparison.times.get(key))],
        tables=tables(comparison),
        sections=SECTIONS,
        charts=page_charts.charts(comparison),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _bracketed(cell: str) -> Markup:
    value, bracket, rest = cell.partition(" [")
    return escape(value) + (Markup(" <small>[{}</small>").format(rest) if bracket else "")
