"""Prints a comparison or a learning summary as tables for a terminal."""

from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

from sam_rollout.report.compare import Comparison, Estimate, Gain, Spread

if TYPE_CHECKING:  # a comparison need not wait for scipy
    from sam_rollout.report.learning import Learning

_GAINS = (
    "speed-up - 1 = BASE / SAM - 1 (the form of published results); time saved = 1 - SAM / BASE; "
    "both from sums over the steps. Equal tokens: time per generated token of the step; inside and "
    "outside the tail, time of all replicas per token made there. CI: paired bootstrap over steps."
)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Fairness, times, gains, then what was trained."""
    console.print(
        f"BASE {comparison.base_label}: {comparison.base_path}", markup=False, soft_wrap=True
    )
    console.print(
        f"SAM  {comparison.sam_label}: {comparison.sam_path}", markup=False, soft_wrap=True
    )
    console.print(_steps_line(comparison), highlight=False, soft_wrap=True)
    if comparison.unfair:
        heading = "UNFAIR comparison: the runs differ in more than the drafts"
        console.print(heading, style="bold red")
        for reason in comparison.unfair:
            console.print(f"  - {reason}", markup=False, highlight=False, soft_wrap=True)
    else:
        console.print("Fair: the runs differ in the sam group only.")
    console.print(_times(comparison))
    console.print(_gains(comparison))
    console.print(_GAINS, style="dim")
    console.print(_quantities(comparison))


def _steps_line(comparison: Comparison) -> str:
    steps = comparison.steps
    line = f"{len(steps)} training steps in common, {steps[0]} to {steps[-1]}"
    if comparison.skipped:
        return f"{line}; skipped at the start: {', '.join(map(str, comparison.skipped))}"
    return f"{line}; none skipped, so a warm-up in the first one counts"


def _columns(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", overflow="fold")
    return table


def _times(comparison: Comparison) -> Table:
    table = _columns(
        "Time per training step, s",
        "",
        "BASE median [IQR]",
        "SAM median [IQR]",
        "BASE total",
        "SAM total",
    )
    for row in comparison.times:
        totals = (_number(row.base.total), _number(row.sam.total))
        table.add_row(row.title, _spread(row.base), _spread(row.sam), *totals)
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


def _number(value: float, sign: str = "") -> str:
    return f"{value:{sign},.0f}" if abs(value) >= 100 else f"{value:{sign}.3g}"


def _spread(spread: Spread) -> str:
    return f"{_number(spread.median)} [{_number(spread.q1)}, {_number(spread.q3)}]"


def _estimate(estimate: Estimate) -> str:
    value = _number(estimate.value, "+")
    if estimate.low is None or estimate.high is None:
        return value
    return f"{value} [{_number(estimate.low, '+')}, {_number(estimate.high, '+')}]"


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
