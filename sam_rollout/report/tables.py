"""Prints a comparison or a learning summary as tables for a terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from sam_rollout.report.compare import Comparison, Spread
from sam_rollout.report.control import control_lines
from sam_rollout.statistics import Estimate, Gain

if TYPE_CHECKING:  # a comparison need not wait for scipy
    from sam_rollout.report.learning import Learning

_GAINS = (
    "speed-up - 1 = BASE / SAM - 1 (the form of published results); time saved = 1 - SAM / BASE; "
    "both from sums over the steps. Equal tokens: time per generated token of the step; inside and "
    "outside the tail, time of all replicas per token made there. CI: of runs and steps."
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Whether it is fair, times, gains, samples, drafts, then what was trained."""
    for side, runs in (("BASE", comparison.base), ("SAM", comparison.sam)):
        for run in runs:
            line = f"{side:<4} {run.label}: {run.path} ({run.source})"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_steps_line(comparison), highlight=False, soft_wrap=True)
    _print_findings(comparison, console)
    console.print(_times(comparison))
    names = ", ".join(f"{row.title} = {row.metric}" for row in comparison.times)
    console.print(f"Metrics: {names}.", style="dim", highlight=False)
    console.print(_gains(comparison))
    console.print(f"{_GAINS} {_interval_line(comparison)}", style="dim")
    for line in control_lines(comparison.sam, comparison.steps):
        console.print(line, markup=False, highlight=False)
    for table in (_tail(comparison), _positions(comparison), _sources(comparison)):
        if table is not None:
            console.print(table)
    if comparison.acceptance.contexts:
        console.print(_contexts(comparison))
    _print_samples(comparison, console)
    console.print(_quantities(comparison))


VERDICTS = {
    True: ("Fair: nothing found that speaks against the comparison", "bold green"),
    False: ("UNFAIR comparison: the difference may not be the drafts' doing", "bold red"),
    None: ("Fairness cannot be told: too little is recorded", "bold yellow"),
}
_SEVERITY_STYLE = {"unfair": "red", "warning": "yellow", "note": "dim", "unknown": "dim"}


def _print_findings(comparison: Comparison, console: Console) -> None:
    text, style = VERDICTS[comparison.fair]
    if comparison.caveat:
        text = f"{text}; {'but' if comparison.fair else 'and'} {comparison.caveat}"
        style = "bold yellow" if comparison.fair else style
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
    for found in comparison.findings:
        console.print(
            f"  {found.severity:<7} {found.name}: {found.text}",
            style=_SEVERITY_STYLE[found.severity],
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _steps_line(comparison: Comparison) -> str:
    steps, runs = comparison.steps, (len(comparison.base), len(comparison.sam))
    line = (
        f"{len(steps)} training steps in common, {steps[0]} to {steps[-1]}; runs: {runs[0]} BASE, "
        f"{runs[1]} SAM"
    )
    if comparison.skipped:
        return f"{line}; skipped at the start: {', '.join(map(str, comparison.skipped))}"
    return f"{line}; none skipped, so a warm-up in the first one counts"


def _interval_line(comparison: Comparison) -> str:
    return f"Intervals hold the noise {comparison.noise}."


def _columns(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _times(comparison: Comparison) -> Table:
    table = _columns(
        "Time per training step, s",
        "",
        "BASE mean",
        "SAM mean",
        "BASE median [IQR]",
        "SAM median [IQR]",
    )
    for row in comparison.times:
        means = (number(row.base.per_step), number(row.sam.per_step))
        table.add_row(row.title, *means, _spread(row.base), _spread(row.sam))
    return table


def _gains(comparison: Comparison) -> Table:
    table = _columns(
        "Gain",
        "",
        "raw:\nspeed-up - 1 [95 % CI]",
        "raw:\ntime saved",
        "equal tokens:\nspeed-up - 1 [95 % CI]",
        "equal tokens:\ntime saved",
    )
    for row in comparison.times:
        table.add_row(row.title, *_forms(row.raw), *_forms(row.equal_tokens))
    return table


def _tail(comparison: Comparison) -> Table | None:
    """The article's stacked bars: few requests running, and the rest of the rollout."""
    head, tail = comparison.time("head"), comparison.time("tail")
    if head is None or tail is None:
        return None
    table = _columns(
        "Rollout of a step, s: long tail (few requests running) and the rest",
        "",
        "long tail",
        "rest",
        "both",
        "tail's share",
    )
    for side in ("base", "sam"):
        parts = [getattr(row, side).per_step for row in (tail, head)]
        share = parts[0] / sum(parts) if sum(parts) else 0.0
        table.add_row(side.upper(), *map(number, (*parts, sum(parts))), f"{share:.0%}")
    return table


def _positions(comparison: Comparison) -> Table | None:
    rows = comparison.acceptance.positions
    if not rows:
        return None
    table = _columns("Accepted drafts by position", "", *(str(row.position) for row in rows))
    table.add_row("share accepted", *(f"{row.accepted_share:.1%}" for row in rows))
    return table


def _sources(comparison: Comparison) -> Table | None:
    rows = comparison.acceptance.sources
    if not rows:
        return None
    table = _columns("Draft tokens by source", "", "verified", "accepted", "rate")
    for row in rows:
        table.add_row(row.name, number(row.drafted), number(row.accepted), f"{row.rate:.1%}")
    return table


def _contexts(comparison: Comparison) -> Table:
    table = _columns(
        "Acceptance by length of context", "context from, tokens", "verified drafts",
        "acceptance length",
    )  # fmt: skip
    for row in comparison.acceptance.contexts:
        length = f"{row.acceptance_length:.3f}"
        table.add_row(f"{row.tokens:,}", number(row.verified), length)
    return table


def _print_samples(comparison: Comparison, console: Console) -> None:
    lossless = comparison.lossless
    if lossless.gaps:
        table = _columns(
            "Rollout against trainer: difference in probability of the same tokens",
            "",
            "mean",
            "largest",
        )
        for gap in lossless.gaps:
            largest = "-" if gap.largest is None else f"{gap.largest:.3g}"
            table.add_row(gap.side, f"{gap.mean:.3g}", largest)
        console.print(table)
    if not lossless.pairs:
        return
    table = _columns(
        "Responses that are the same in two runs",
        "",
        "compared by",
        "the same",
        "without partner",
        "first difference",
    )
    for pair in (*lossless.pairs, *lossless.controls):
        first = "-" if pair.first_step is None else f"step {pair.first_step}"
        if pair.first_difference is not None:
            first += f", token {pair.first_difference}"
        same = f"{pair.identical:,} of {pair.matched:,}"
        table.add_row(" / ".join(pair.runs), pair.by, same, str(pair.unmatched), first)
    console.print(table)


def _quantities(comparison: Comparison) -> Table:
    table = _columns(
        "Beside the times, per training step",
        "",
        "BASE median [IQR]",
        "SAM median [IQR]",
        "mean SAM - BASE [95 % CI]",
    )
    for row in comparison.quantities:
        table.add_row(row.title, _spread(row.base), _spread(row.sam), _estimate(row.difference))
    return table


def print_learning(learning: "Learning", console: Console) -> None:
    """First and last steps of each accuracy, with the interval of the difference."""
    table = _columns(
        f"Accuracy of {learning.label}, first and last steps",
        "",
        "steps",
        "first",
        "last",
        "last - first,\npoints",
        "95 % CI,\nWelch",
        "95 % CI,\nbootstrap",
        "p, Welch",
    )
    for row in learning.rows:
        table.add_row(
            row.title,
            f"{row.window} + {row.window} of {len(row.series)}",
            f"{row.first:.1%}",
            f"{row.last:.1%}",
            f"{100 * row.difference:+.1f}",
            _interval(100 * row.welch_low, 100 * row.welch_high, "+.1f"),
            _interval(100 * row.bootstrap_low, 100 * row.bootstrap_high, "+.1f"),
            f"{row.p_value:.2g}",
        )
    console.print(table)
    for remark in learning.remarks:
        console.print(remark, markup=False, soft_wrap=True)
    console.print(
        "Both intervals take steps as independent; over so few steps trust Welch's, the bootstrap "
        "is too narrow.",
        style="dim",
    )


def number(value: float, sign: str = "") -> str:
    """Three significant digits, whole numbers from 100."""
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.3g}"


def _spread(spread: Spread) -> str:
    return f"{number(spread.median)} [{number(spread.q1)}, {number(spread.q3)}]"


def _estimate(estimate: Estimate) -> str:
    value = number(estimate.value, "+")
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{number(estimate.low, '+')}, {number(estimate.high, '+')}]"


def _forms(gain: Gain | None) -> tuple[str, str]:
    if gain is None:
        return "-", "-"
    faster = gain.speed_up_minus_one
    text = f"{faster.value:+.2%}"
    if faster.low is not None and faster.high is not None:
        text = f"{text} {_interval(faster.low, faster.high, '+.1%')}"
    return text, f"{gain.time_saved.value:+.2%}"


def _interval(low: float, high: float, form: str) -> str:
    return f"[{low:{form}}, {high:{form}}]"
