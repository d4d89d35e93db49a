"""Small charts as SVG: coloured by the page's style sheet, with values to hover over.

Every function returns the markup of one chart of WIDTH units; the page scales it. Elements with
`data-tip` show that text when pointed at.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

WIDTH = 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 12, 36  # margins of the plotting area
_NAMES = 150  # room for the names left of intervals
_MARKED = 60  # points; longer lines carry no markers


@dataclass(frozen=True)
class Line:
    """One line: x rises; a thin one is drawn behind the others and not named when pointed at."""

    name: str
    style: str  # "base" or "sam"
    points: list[tuple[float, float]]
    thin: bool = False
    stepped: bool = False


@dataclass(frozen=True)
class Interval:
    """A value with its interval, or without if low and high are None."""

    name: str
    style: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class _Scale:
    """Data to units along one axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def number(value: float) -> str:
    """As short as an axis or a hint needs."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 100 else f"{value:.3g}"


def lines(
    series: Iterable[Line],
    *,
    x_title: str,
    unit: str = "",
    height: int = 220,
    zero_based: bool = False,
    hints: bool = True,
) -> Markup:
    """Lines over a common x, with a column to point at for every x."""
    series = [line for line in series if line.points]
    if not series:
        return _empty(height)
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    x_ticks, y_ticks = _ticks(xs, 6, whole=hints), _ticks([*ys, *([0.0] * zero_based)], 5)
    x = _Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, _LEFT, WIDTH - _RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], height - _BOTTOM, _TOP)
    body = [_y_axis(y_ticks, y), _x_axis([t for t in x_ticks if x.low <= t <= x.high], x, height)]
    body.append(_x_title(x_title, height))
    for line in sorted(series, key=lambda line: not line.thin):
        body.append(_path(line, x, y))
    if hints:
        body += _columns([line for line in series if not line.thin], x, unit, height)
    return _svg(height, body)


def stacked(
    rows: Sequence[tuple[str, str, Sequence[float]]], names: Sequence[str], unit: str
) -> Markup:
    """Horizontal bars (name, style, parts), the first part in full colour, the second light."""
    each, tall = 74, 54
    height = 24 + each * len(rows)
    longest = max((sum(parts) for _, _, parts in rows), default=0.0)
    if not longest:
        return _empty(height)
    x = _Scale(0, longest, _LEFT, WIDTH - _RIGHT)
    body = []
    for place, (name, style, parts) in enumerate(rows):
        top, start = 12 + each * place, 0.0
        label = top + tall / 2 + 4
        body.append(f'<text x="{_LEFT - 6}" y="{label}" class="end">{escape(name)}</text>')
        for part, tone, part_name in zip(parts, ("full", "light"), names, strict=True):
            left, right = x(start), x(start + part)
            wide, middle = max(right - left - 1.5, 0), (left + right) / 2
            tip = f"{name}, {part_name}: {number(part)} {unit} ({part / sum(parts):.0%})"
            body.append(
                f'<rect x="{left}" y="{top}" width="{wide:.1f}" height="{tall}" '
                f'rx="3" class="{style} {tone}" data-tip="{escape(tip)}"/>'
            )
            if right - left > 44:
                body.append(
                    f'<text x="{middle:.1f}" y="{label}" class="mid on {tone}">'
                    f"{number(part)} {unit}</text>"
                )
            start += part
    return _svg(height, body)


def intervals(rows: Sequence[tuple[str, Sequence[Interval]]]) -> Markup:
    """Values with intervals, as per cent, one row a name, several values in a row below another."""
    each, head = 16, 10
    heights = [head + each * len(row) for _, row in rows]
    height = sum(heights) + _BOTTOM + 6
    found = [
        100 * value
        for _, row in rows
        for interval in row
        for value in (interval.value, interval.low, interval.high)
        if value is not None and isfinite(value)
    ]
    if not found:
        return _empty(height)
    ticks = _ticks([0.0, *found], 3)
    left = _NAMES
    x = _Scale(ticks[0], ticks[-1], left, WIDTH - 26)
    bottom = height - _BOTTOM
    body = [
        f'<line x1="{x(t)}" x2="{x(t)}" y1="4" y2="{bottom}" class="{"rule" if t else "zero"}"/>'
        f'<text x="{x(t)}" y="{bottom + 15}" class="mid">{f"{t:+g}" if t else 0} %</text>'
        for t in ticks
    ]
    top = 4
    for (name, row), tall in zip(rows, heights, strict=True):
        label = top + tall / 2 + 4
        body.append(f'<text x="{left - 8}" y="{label:.1f}" class="end">{escape(name)}</text>')
        for place, interval in enumerate(row):
            middle = top + head / 2 + each * (place + 0.5)
            body.append(_interval(interval, name, x, middle))
        top += tall
    return _svg(height, body)


def bars(rows: Sequence[tuple[str, float]], *, x_title: str, height: int = 220) -> Markup:
    """Vertical bars of shares (0 to 1)."""
    if not rows:
        return _empty(height)
    y_ticks = _ticks([0.0, *(100 * share for _, share in rows)], 5)
    y = _Scale(0, y_ticks[-1], height - _BOTTOM, _TOP)
    wide = (WIDTH - _LEFT - _RIGHT) / len(rows)
    bar = min(0.6 * wide, 60)
    body = [_y_axis(y_ticks, y, " %"), _x_title(x_title, height)]
    for place, (name, share) in enumerate(rows):
        middle, top = _LEFT + wide * (place + 0.5), y(100 * share)
        tip = f"{x_title} {name}: {share:.1%}"
        body.append(
            f'<rect x="{middle - bar / 2:.1f}" y="{top}" width="{bar:.1f}" '
            f'height="{height - _BOTTOM - top:.1f}" rx="3" class="sam full" '
            f'data-tip="{escape(tip)}"/>'
            f'<text x="{middle:.1f}" y="{top - 4}" class="mid strong">{share:.0%}</text>'
            f'<text x="{middle:.1f}" y="{height - _BOTTOM + 15}" class="mid">{escape(name)}</text>'
        )
    return _svg(height, body)


def _svg(height: float, body: Iterable[str]) -> Markup:
    return Markup(  # every text within was escaped where it was put in
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img">{"".join(body)}</svg>'
    )


def _empty(height: int) -> Markup:
    return _svg(height, [f'<text x="{WIDTH / 2}" y="{height / 2}" class="mid">not recorded</text>'])


def _ticks(values: Sequence[float], count: int, *, whole: bool = False) -> list[float]:
    low, high = min(values), max(values)
    if low == high:
        low, high = low - (abs(low) or 1) * 0.1, high + (abs(high) or 1) * 0.1
    locator = MaxNLocator(count, integer=whole, steps=[1, 2, 2.5, 5, 10])
    return [float(f"{tick:.10g}") for tick in locator.tick_values(low, high)]


def _y_axis(ticks: Sequence[float], y: _Scale, unit: str = "") -> str:
    return "".join(
        f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y(t)}" y2="{y(t)}" class="rule"/>'
        f'<text x="{_LEFT - 6}" y="{y(t) + 4}" class="end">{number(t)}{unit}</text>'
        for t in ticks
    )


def _x_axis(ticks: Sequence[float], x: _Scale, height: int) -> str:
    base = height - _BOTTOM
    return f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}" class="axis"/>' + (
        "".join(f'<text x="{x(t)}" y="{base + 15}" class="mid">{number(t)}</text>' for t in ticks)
    )


def _x_title(title: str, height: int) -> str:
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    return f'<text x="{middle}" y="{height - 5}" class="mid dim">{escape(title)}</text>'


def _path(line: Line, x: _Scale, y: _Scale) -> str:
    points = [(x(one), y(other)) for one, other in line.points]
    if line.stepped:
        path = f"M{points[0][0]} {points[0][1]}"
        path += "".join(f"H{one}V{other}" for one, other in points[1:])
    else:
        path = "M" + "L".join(f"{one} {other}" for one, other in points)
    style = f"{line.style} line{' thin' if line.thin else ''}"
    drawn = f'<path d="{path}" class="{style}"/>'
    if line.thin or line.stepped or len(points) > _MARKED:
        return drawn
    return drawn + "".join(
        f'<circle cx="{one}" cy="{other}" r="2.8" class="{line.style} dot"/>'
        for one, other in points
    )


def _columns(series: list[Line], x: _Scale, unit: str, height: int) -> list[str]:
    """Invisible columns, each as wide as its x has room, with the values there."""
    values: dict[float, list[str]] = {}
    for line in series:
        for one, other in line.points:
            values.setdefault(one, []).append(f"{line.name} {number(other)}{unit}")
    places = sorted(values)
    columns = []
    for index, place in enumerate(places):
        left = x((places[index - 1] + place) / 2) if index else _LEFT
        right = x((place + places[index + 1]) / 2) if index + 1 < len(places) else WIDTH - _RIGHT
        tip = f"step {number(place)}: {', '.join(values[place])}"
        columns.append(
            f'<rect x="{left}" y="{_TOP}" width="{max(right - left, 1):.1f}" '
            f'height="{height - _TOP - _BOTTOM}" class="hit" data-tip="{escape(tip)}"/>'
        )
    return columns


def _interval(interval: Interval, name: str, x: _Scale, middle: float) -> str:
    at = x(100 * interval.value)
    tip = f"{name}, {interval.name}: {interval.value:+.1%}"
    drawn = ""
    if interval.low is not None and interval.high is not None:
        ends = x(100 * interval.low), x(100 * interval.high)
        drawn = f'<line x1="{ends[0]}" x2="{ends[1]}" y1="{middle}" y2="{middle}" class="whisker"/>'
        tip += f" [{interval.low:+.1%}, {interval.high:+.1%}]"
    return (
        f'{drawn}<circle cx="{at}" cy="{middle}" r="4.2" class="{interval.style}"/>'
        f'<rect x="{_NAMES}" y="{middle - 7}" width="{WIDTH - _NAMES}" height="14" class="hit" '
        f'data-tip="{escape(tip)}"/>'
    )
