"""The command `simulate`, which forecasts the gain of drafts for a recorded run."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from sam_rollout.bench.recorded_baseline import Baseline, read_baseline
from sam_rollout.bench.simulated_engine import Outcome, sample
from sam_rollout.report.comparison_tables import Table, print_table


def forecast(path: Path, steps: int | None, console: Console) -> dict[str, Any]:
    """Print the estimated gain of `sam=on` for a run without drafts; return it as JSON values.

    Raises:
        BaselineError: The run cannot be replayed.
        RunFolderError: The folder is no run folder.
    """
    run = read_baseline(path, steps)
    responses = sum(len(one) for rollout in run.rollouts for one in rollout.rounds)
    outcomes: list[list[Outcome]] = []
    with Progress(console=Console(stderr=True), transient=True) as bar:
        for title, drafts in (("without drafts", False), ("with drafts", True)):
            task = bar.add_task(title, total=responses)
            outcomes.append(list(sample(run, drafts=drafts, progress=partial(bar.advance, task))))
    base, sam = outcomes
    print_table(_table(run, base, sam), console)
    rows = [
        {"step": rollout.step, "recorded_s": rollout.recorded_s, "base": asdict(one),
         "sam": asdict(other)}
        for rollout, one, other in zip(run.rollouts, base, sam, strict=True)
    ]  # fmt: skip
    return {"steps": rows}


def _table(run: Baseline, base: Sequence[Outcome], sam: Sequence[Outcome]) -> Table:
    steps = [
        (rollout.recorded_s, one.rollout_s, other.rollout_s, one.tail_s, other.tail_s,
         other.verified_rows, other.accepted)
        for rollout, one, other in zip(run.rollouts, base, sam, strict=True)
    ]  # fmt: skip
    names = [*(str(rollout.step) for rollout in run.rollouts), "all"]
    sums = [sum(column) for column in zip(*steps, strict=True)]
    head = (
        "training step", "recorded, s", "simulated, s", "with sam=on, s", "times as fast",
        "long tail, s", "with sam=on, s", "tokens per verify step",
    )  # fmt: skip
    rows = [(name, *_cells(*step)) for name, step in zip(names, [*steps, sums], strict=True)]
    return Table("rollout", head, rows)


def _cells(*figures: float) -> tuple[str, ...]:
    recorded_s, base_s, sam_s, base_tail_s, sam_tail_s, drafts, accepted = figures
    return (
        f"{recorded_s:,.1f}", f"{base_s:,.1f}", f"{sam_s:,.1f}",
        f"{base_s / sam_s:.2f}" if sam_s else "-",
        f"{base_tail_s:,.1f}", f"{sam_tail_s:,.1f}",
        f"{1 + accepted / drafts:.2f}" if drafts else "-",
    )  # fmt: skip
