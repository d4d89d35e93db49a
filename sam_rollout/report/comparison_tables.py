"""Makes the tables of a comparison, for the terminal, the HTML page and Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from sam_rollout.core.statistics import Gain
from sam_rollout.report.compare import Comparison, Spread, interval, number
from sam_rollout.report.verdict_sentences import sentences


@dataclass(frozen=True)
class Table:
    """A table of texts, whose first column names the rows."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def tables(comparison: Comparison) -> dict[str, Table]:
    """Return the tables of a comparison by name; a table without records has no rows."""
    lossless = comparison.lossless
    return {
        "gains": Table(
            "Times and gains",
            (
                "per step", "BASE, s", "SAM, s", "gain, raw", "time saved, raw",
                "gain, equal tokens", "time saved, equal tokens",
            ),
            [
                (row.title, number(row.base.per_step), number(row.sam.per_step))
                + (*_gain(row.raw), *_gain(row.equal_tokens))
                for row in comparison.times.values()
            ],
            "Means over steps and runs. Gain = BASE / SAM - 1 (the form of published results); "
            "time saved = 1 - SAM / BASE; both from sums over the steps. Equal tokens: time per "
            "token generated in the step; inside and outside the tail, time of all replicas per "
            f"token generated there. Brackets hold 95 % intervals of the noise {comparison.noise}.",
        ),
        "samples": Table(
            "Responses that are the same in two runs",
            ("runs", "compared by", "the same responses", "without partner", "first difference"),
            [
                (
                    " / ".join(pair.runs),
                    pair.by,
                    f"{pair.identical:,} of {pair.matched:,}",
                    str(pair.unmatched),
                    _first(pair.first_step, pair.first_difference),
                )
                for pair in (*lossless.pairs, *lossless.controls)
            ],
        ),
        "quantities": Table(
            "Beside the times",
            (
                "per step", "BASE, median [quartiles]", "SAM, median [quartiles]",
                "mean SAM - BASE [95 %]",
            ),
            [
                (
                    row.title, _spread(row.base), _spread(row.sam),
                    f"{number(row.difference.value, '+')}{interval(row.difference, 1, '+.3g')}",
                )
                for row in comparison.quantities.values()
            ],
        ),
    }  # fmt: skip


def _first(step: int | None, token: int | None) -> str:
    if step is None:
        return "-"
    return f"step {step}" if token is None else f"step {step}, token {token}"


def _gain(gain: Gain | None) -> tuple[str, str]:
    if gain is None:
        return "-", "-"
    faster = gain.speed_up_minus_one
    return f"{faster.value:+.1%}{interval(faster, 100)}", f"{gain.time_saved.value:+.1%}"


def _spread(spread: Spread) -> str:
    return f"{number(spread.median)} [{number(spread.q1)}, {number(spread.q3)}]"


def markdown(table: Table) -> str:
    """Return the table in Markdown, without its title."""
    lines = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def print_table(table: Table, console: Console) -> None:
    """Print a table unless it is empty."""
    if not table.rows:
        return
    console.print(table.title, style="bold", markup=False, highlight=False)
    rich = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(table.head):
        narrow = column.replace(", ", ",\n") if len(column) > 9 else column
        rich.add_column(Text(narrow), justify="right" if place else "left", overflow="fold")
    for row in table.rows:
        rich.add_row(*map(Text, row))
    console.print(rich)
    if table.note:
        console.print(table.note, style="dim", highlight=False)


VERDICTS = {
    True: ("Fair: nothing found that speaks against the comparison", "bold green"),
    False: ("UNFAIR comparison: the difference may not be the drafts' doing", "bold red"),
    None: ("Fairness unknown: too little is recorded", "bold yellow"),
}
_SEVERITY_STYLE = {"unfair": "red", "warning": "yellow", "note": "dim", "unknown": "dim"}


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print a comparison: sentences, verdict, findings and tables."""

    def say(text: str, style: str | None = None) -> None:
        console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)

    for sentence in sentences(comparison):
        say(sentence, "bold")
    for run in comparison.runs:
        say(f"{run.name:<4} {run.start.label}: {run.path}")
    say(_steps_line(comparison))
    text, style = VERDICTS[comparison.fair]
    if comparison.caveat:
        text = f"{text}; {'but' if comparison.fair else 'and'} {comparison.caveat}"
        style = "bold yellow" if comparison.fair else style
    say(text, style)
    for found in comparison.findings:
        say(f"  {found.severity:<7} {found.name}: {found.text}", _SEVERITY_STYLE[found.severity])
    for name, table in tables(comparison).items():
        print_table(table, console)
        if name == "gains":
            metrics = ", ".join(f"{row.title} = {row.metric}" for row in comparison.times.values())
            say(f"Metrics: {metrics}.", "dim")


def _steps_line(comparison: Comparison) -> str:
    steps, runs = comparison.steps, (len(comparison.base), len(comparison.sam))
    line = (
        f"{len(steps)} training steps in common, {steps[0]} to {steps[-1]}; runs: {runs[0]} BASE, "
        f"{runs[1]} SAM"
    )
    if comparison.skipped:
        return f"{line}; skipped at the start: {', '.join(map(str, comparison.skipped))}"
    return f"{line}; none skipped (--skip-first 1 leaves out a warm-up in the first step)"
