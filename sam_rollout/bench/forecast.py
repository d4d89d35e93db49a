"""The command `simulate`, which prints a forecast for a run folder as a table and JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from sam_rollout.bench.recorded_baseline import Baseline, read_baseline
from sam_rollout.bench.simulated_engine import Outcome, sample
from sam_rollout.core.json_values import dumps
from sam_rollout.report.comparison_tables import Table, print_table

if TYPE_CHECKING:
    from rich.console import Console


def forecast(path: Path, steps: int | None, console: Console, output: Path | None) -> None:
    """Estimate the gain of `sam=on` for a run.

    Args:
        path: Folder of a run without drafts.
        steps: Number of training steps; None takes all.
        console: Prints the table.
        output: File for the results as JSON; None writes none.

    Raises:
        BaselineError: The run cannot be replayed.
        RunFolderError: The folder is no run folder.
    """
    from rich.console import Console
    from rich.progress import Progress

    run = read_baseline(path, steps)
    responses = sum(len(one) for rollout in run.rollouts for one in rollout.rounds)
    outcomes: list[list[Outcome]] = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for title, drafts in (("without drafts", False), ("with drafts", True)):
            task = bar.add_task(title, total=responses)
            outcomes.append(list(sample(run, drafts=drafts, progress=partial(bar.advance, task))))
    base, sam = outcomes
    print_table(_table(run, base, sam), console)
    if output is not None:
        rows = [
            {"step": rollout.step, "recorded_s": rollout.recorded_s, "base": asdict(one),
             "sam": asdict(other)}
            for rollout, one, other in zip(run.rollouts, base, sam, strict=True)
        ]  # fmt: skip
        output.write_text(dumps({"steps": rows}, indent=1) + "\n", encoding="utf-8")


def _table(run: Baseline, base: Sequence[Outcome], sam: Sequence[Outcome]) -> Table:
    recorded_s = [rollout.recorded_s for rollout in run.rollouts]
    rows = [
        _row(str(rollout.step), [rollout.recorded_s], [one], [other])
        for rollout, one, other in zip(run.rollouts, base, sam, strict=True)
    ]
    head = (
        "training step", "recorded, s", "simulated, s", "with sam=on, s", "times as fast",
        "long tail, s", "with sam=on, s", "tokens per verify step",
    )  # fmt: skip
    return Table("rollout", head, [*rows, _row("all", recorded_s, base, sam)])


def _row(
    name: str, recorded_s: Sequence[float], base: Sequence[Outcome], sam: Sequence[Outcome]
) -> tuple[str, ...]:
    base_s, sam_s = (sum(one.rollout_s for one in side) for side in (base, sam))
    tails_s = (sum(one.tail_s for one in side) for side in (base, sam))
    rows = sum(one.verified_rows for one in sam)
    accepted = sum(one.accepted for one in sam)
    return (
        name, f"{sum(recorded_s):,.1f}", f"{base_s:,.1f}", f"{sam_s:,.1f}",
        f"{base_s / sam_s:.2f}" if sam_s else "-", *(f"{tail_s:,.1f}" for tail_s in tails_s),
        f"{1 + accepted / rows:.2f}" if rows else "-",
    )  # fmt: skip
