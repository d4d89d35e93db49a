"""A comparison as one HTML file that needs no network: what it says, with charts to point at."""

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from sam_rollout.report import fairness, svg
from sam_rollout.report.compare import Comparison, TimeRow
from sam_rollout.report.coverage import common_steps
from sam_rollout.report.runs import Run
from sam_rollout.report.tables import number
from sam_rollout.statistics import Estimate

TEMPLATES = Path(__file__).parent / "templates"
_SHOWN_GAINS = ("round", "rollout", "step", "tail", "head")
_CURVE_POINTS = 120  # of a distribution or a profile; more cannot be seen
_LONGEST_VALUE = 120  # characters of a configuration value


@dataclass(frozen=True)
class Chart:
    """A chart with its title and the sentence on how to read it."""

    title: str
    reading: str
    picture: Markup


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
    environment.filters |= {"number": number, "percent": _percent, "interval": _interval}
    return environment.get_template("compare.html.j2").render(
        comparison=comparison,
        headline=_headline(comparison),
        tiles=[row for key in ("rollout", "tail", "step") if (row := comparison.time(key))],
        unfair=[f for f in comparison.findings if f.severity == fairness.UNFAIR],
        gains=_gains(comparison),
        tail=_tail(comparison),
        curves=_curves(comparison),
        drafts=_drafts(comparison),
        config=_config_rows(comparison),
        runs=[("BASE", run) for run in comparison.base] + [("SAM", run) for run in comparison.sam],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _percent(value: float | None, digits: int = 1) -> str:
    return "–" if value is None else f"{100 * value:+.{digits}f} %"


def _interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"[{100 * estimate.low:+.1f}, {100 * estimate.high:+.1f}]"


def _best(row: TimeRow) -> Any:
    """The gain to go by: at equal tokens where that is known."""
    return row.equal_tokens or row.raw


def _headline(comparison: Comparison) -> str:
    row = comparison.time("rollout") or comparison.time("step")
    gain = _best(row) if row else None
    if row is None or gain is None:
        return "No time that both sides recorded"
    what = "A rollout" if row.key == "rollout" else "A training step"
    estimate = gain.speed_up_minus_one
    ratio = f"{1 + estimate.value:.2f}×"
    if not estimate.clear:
        return f"{what} with SAM: no clear gain ({ratio} as fast)"
    return f"{what} with SAM: {ratio} as fast"


def _gains(comparison: Comparison) -> Chart:
    rows = []
    for key in _SHOWN_GAINS:
        row = comparison.time(key)
        values = [
            svg.Interval(name, style, *_numbers(gain.speed_up_minus_one))
            for name, style, gain in (
                ("raw", "hollow", row.raw if row else None),
                ("equal tokens", "solid", row.equal_tokens if row else None),
            )
            if gain is not None
        ]
        if row and values:
            rows.append((row.title, values))
    reading = (
        "Right of zero SAM is faster. Hollow: raw; full: at equal tokens. A bar that crosses zero "
        "is no clear gain."
    )
    return Chart("Gain, BASE/SAM − 1", reading, svg.intervals(rows))


def _numbers(estimate: Estimate) -> tuple[float, float | None, float | None]:
    return estimate.value, estimate.low, estimate.high


def _tail(comparison: Comparison) -> list[Chart]:
    charts = []
    tail, head = comparison.time("tail"), comparison.time("head")
    if tail and head:
        rows = [
            ("BASE", "base", (tail.base.per_step, head.base.per_step)),
            ("SAM", "sam", (tail.sam.per_step, head.sam.per_step)),
        ]
        reading = (
            "Mean rollout of a step. Full colour: time with few requests running, where drafts "
            "help; light: the rest, which should stay alike."
        )
        picture = svg.stacked(rows, ("long tail", "rest"), "s")
        charts.append(Chart("Long tail and the rest", reading, picture))
    if profile := _profile(comparison):
        charts.append(profile)
    return charts


def _profile(comparison: Comparison) -> Chart | None:
    """Requests running over one step's rollout, in the run of each side that is the middle one."""
    frame = comparison.series.get("rollout")
    if frame is None:
        return None
    known = frame["base"].dropna().sort_values()
    step = int(known.index[len(known) // 2])
    lines = []
    for name, runs in (("BASE", comparison.base), ("SAM", comparison.sam)):
        curves = sorted(filter(None, (_running(run, step) for run in runs)), key=_end)
        if not curves:
            return None
        lines.append(svg.Line(name, name.lower(), curves[len(curves) // 2], stepped=True))
    reading = (
        f"Step {step}, the middle one by time; of each side the middle run, its slowest engine. "
        "The low part on the right is the long tail; the line that ends first is the faster side."
    )
    picture = svg.lines(lines, x_title="busy time of the engine, s", hints=False, zero_based=True)
    return Chart("Requests running", reading, picture)


def _end(curve: list[tuple[float, float]]) -> float:
    return curve[-1][0]


def _running(run: Run, step: int) -> list[tuple[float, float]]:
    """(s, requests) along one step of the run's slowest replica; empty if it was not recorded."""
    if run.engine_steps.empty:
        return []
    rows = run.engine_steps[run.engine_steps["step"] == step]
    if rows.empty:
        return []
    slowest = rows.groupby("replica")["duration_s"].sum().idxmax()
    rows = rows[rows["replica"] == slowest].sort_values("time_s", kind="stable")
    time_s = rows["duration_s"].cumsum().to_numpy()
    picked = np.unique(np.linspace(0, len(rows) - 1, _CURVE_POINTS).round().astype(int))
    points = zip(time_s[picked], rows["scheduled"].to_numpy()[picked], strict=True)
    return [(round(float(x), 3), float(y)) for x, y in points]


def _curves(comparison: Comparison) -> list[Chart]:
    shown = (
        ("rollout", "Rollout per step", " s", "Lower is faster."),
        ("step", "Whole step", " s", "Rollout, training and the rest."),
        (
            "response_length", "Mean response length", " tokens",
            "Lines that lie on each other: both sides did the same work.",
        ),
        ("reward", "Mean reward", "", "Lines that part mean that the sides learnt differently."),
        ("accuracy", "Accuracy before filtering", "", "Share of right responses in training."),
    )  # fmt: skip
    charts = []
    for key, title, unit, reading in shown:
        if key in comparison.series:
            lines = _side_lines(comparison, key)
            zero = key in ("rollout", "step")
            picture = svg.lines(lines, x_title="training step", unit=unit, zero_based=zero)
            charts.append(Chart(title, f"{reading}{_thin(comparison)}", picture))
    if distribution := _distribution(comparison):
        charts.insert(min(3, len(charts)), distribution)
    return charts


def _thin(comparison: Comparison) -> str:
    several = max(len(comparison.base), len(comparison.sam)) > 1
    return " Thick: mean over runs; thin: every run." if several else ""


def _side_lines(comparison: Comparison, key: str) -> list[svg.Line]:
    every = comparison.runs[key]
    lines = [
        svg.Line(f"{side} {number}", side, _points(every[side, number]), thin=True)
        for side, number in every.columns
        if every[side].shape[1] > 1
    ]
    means = comparison.series[key]
    return lines + [svg.Line(side.upper(), side, _points(means[side])) for side in ("base", "sam")]


def _points(series: Any) -> list[tuple[float, float]]:
    return [(float(step), float(value)) for step, value in series.dropna().items()]


def _distribution(comparison: Comparison) -> Chart | None:
    lines = []
    shares = np.linspace(0, 1, _CURVE_POINTS)
    steps = common_steps([*comparison.base, *comparison.sam], comparison.steps)
    if not steps:
        return None
    for name, runs in (("BASE", comparison.base), ("SAM", comparison.sam)):
        quantiles = np.quantile(fairness.response_lengths(runs, steps), shares)
        points = zip(quantiles.round(1).tolist(), (100 * shares).round(2).tolist(), strict=True)
        lines.append(svg.Line(name, name.lower(), list(points)))
    reading = (
        "Share of responses (%) that are at most so long. Curves apart: raw times compare unlike "
        "work."
    )
    picture = svg.lines(lines, x_title="response length, tokens", hints=False, zero_based=True)
    return Chart("Response lengths", reading, picture)


def _drafts(comparison: Comparison) -> list[Chart]:
    found, charts = comparison.acceptance, []
    if "acceptance_length" in comparison.series:
        lines = _side_lines(comparison, "acceptance_length")
        reading = "Tokens a request gains in a step that verifies drafts; 1 = no drafts."
        picture = svg.lines(lines, x_title="training step", unit=" tokens")
        charts.append(Chart("Acceptance length", reading, picture))
    if found.positions:
        rows = [(str(row.position), row.accepted_share) for row in found.positions]
        reading = "Share of verified drafts accepted up to this position."
        charts.append(Chart("Accepted by position", reading, svg.bars(rows, x_title="position")))
    if found.sources:
        rows = [(row.name, row.rate) for row in found.sources]
        reading = "Accepted share of the draft tokens of each source."
        charts.append(Chart("Accepted by source", reading, svg.bars(rows, x_title="source")))
    if found.contexts:
        points = [(float(row.tokens), row.acceptance_length) for row in found.contexts]
        reading = "The longer the text so far, the more there is to find again in it."
        line = svg.Line("SAM", "sam", points)
        picture = svg.lines([line], x_title="context from, tokens", hints=False)
        charts.append(Chart("Acceptance length by context", reading, picture))
    return charts


def _config_rows(comparison: Comparison) -> list[tuple[str, str, str, bool]] | None:
    """Settings that differ: name, BASE, SAM, whether they may; None if a side has none recorded.

    What a run is shown beside is none, nor are places: a page is handed on.
    """
    configs = [side[0].start.config for side in (comparison.base, comparison.sam)]
    if any(config is None for config in configs):
        return None
    everything = [fairness.in_place(config) for config in configs]
    judged = [fairness.comparable(config) for config in configs]
    rows = []
    for name, left, right in fairness.differences(*everything):
        expected = all(name not in side for side in judged) or (
            judged[0].get(name) == judged[1].get(name)
        )
        parts = name.split(".")
        if parts[0] != "compare" and parts[-1] not in {"run_dir", *fairness.PLACES}:
            rows.append((name, _short(left), _short(right), expected))
    return sorted(rows, key=lambda row: row[3])


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
