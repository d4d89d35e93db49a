"""Draws the charts of a comparison's page as inline SVG.

In the SVG, matplotlib's colours are replaced by variables of the page's style sheet. The page shows
the text of the attribute `data-tip` as a tooltip.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import matplotlib
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sam_rollout.report.charts import INK, MUTED, RULE, STYLE, Side, draw
from sam_rollout.report.compare import Comparison, number
from sam_rollout.report.panels import SECTIONS, Panel
from sam_rollout.report.pictures import BASE, SAM, heading, sides

SIZE = (4.0, 2.4)  # inches; the page scales the charts
_VARIABLES = {BASE: "base", SAM: "sam", INK: "ink", MUTED: "muted", RULE: "rule"}
_STYLE = STYLE | {
    "font.size": 9,
    "svg.fonttype": "none",  # Keeps words as text, not as outlines.
    "svg.hashsalt": "sam_rollout",  # Makes the ids in a chart's SVG reproducible.
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Chart:
    """A chart with a title and a sentence on how to read the chart."""

    title: str
    reading: str
    picture: Markup


def charts(comparison: Comparison) -> dict[str, list[Chart]]:
    """Return charts by section title, one for each panel for which a side has data."""
    both = sides(comparison)
    found: dict[str, list[Chart]] = {}
    for section in SECTIONS:
        drawn = found.setdefault(section.title, [])
        for panel in (panel.of_both_sides() for panel in section.panels):
            if any(side.curve if panel.picture else side.shown(panel) for side in both):
                result = [f"{heading(comparison, panel)[0]}."] if panel.row else []
                reading = " ".join([*result, panel.reading])
                drawn.append(Chart(panel.title, reading, _as_svg(panel, both)))
    return found


def _as_svg(panel: Panel, both: Sequence[Side]) -> Markup:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=SIZE, layout="constrained")
        axis = figure.subplots()
        if values := draw(axis, panel, both):
            _columns(axis, values, panel.unit)
        handles, labels = axis.get_legend_handles_labels()
        if not set(labels) <= {"BASE", "SAM"}:  # the page explains BASE and SAM
            figure.legend(handles, labels, loc="outside lower left", ncols=2)
        file = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=no_metadata)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r' (width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r' id="tip:([^"]*)"', r' data-tip="\1"', text)
    text = re.sub(r' id="[A-Za-z0-9.]+_\d+"', "", text)  # these ids are not unique on the page
    for colour, name in _VARIABLES.items():
        text = text.replace(colour.lower(), f"var(--{name})")
    text = re.sub(r' (?:d|points|transform|x|y)="[^"]*"', _rounded, text)
    text = re.sub(r"\s*\n\s*", " ", text)
    return Markup(text)  # matplotlib has escaped the texts


def _rounded(attribute: re.Match[str]) -> str:
    return re.sub(r"\d+\.\d{3,}", lambda place: f"{float(place[0]):.2f}", attribute[0])


def _columns(axis: Axes, values: Mapping[str, pd.Series], unit: str) -> None:
    table = pd.DataFrame(values)
    for step, row in table.iterrows():
        known = ", ".join(f"{name} {number(value)}" for name, value in row.dropna().items())
        tip = f"tip:step {step}: {known} {unit}".rstrip()
        axis.axvspan(step - 0.5, step + 0.5, facecolor="none", edgecolor="none", gid=tip)
