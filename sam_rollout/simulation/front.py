"""The command `simulate`: files in, tables, pictures and JSON out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam_rollout.simulation import report, validation
from sam_rollout.simulation.alternatives import replay_settings
from sam_rollout.simulation.costs import CostTable, CostTableError
from sam_rollout.simulation.host import HostCosts
from sam_rollout.simulation.models import ModelDrafts, given_model, recorded_model
from sam_rollout.simulation.rollout import Fleet
from sam_rollout.simulation.validation import Validation, ValidationError
from sam_rollout.simulation.workload import Workload, WorkloadError, model_of, read_workload
from sam_rollout.telemetry.records import RunFolder

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, called with what is done and what there is to do."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def replay(
    path: Path, calibration: Path, step: int | None, replicas: int | None,
    max_num_seqs: int | None, thresholds: Sequence[int], ks: Sequence[int], *, siblings: bool,
    captured: Sequence[int] | None, pad: bool, tail_threshold: int, console: Console,
    picture: Path | None, output: Path | None, host_costs: Path | None, scheduling: str,
    model_acceptance: Sequence[float] = (), model_runs: Sequence[Path] = (),
    pass_cost: float | None = None,
) -> None:  # fmt: skip
    """Replay a recorded step under several settings; options as in the command's help."""
    table = _table(calibration, host_costs, scheduling)
    models = _models(model_acceptance, model_runs, pass_cost)
    workload = read_workload(path, step)
    if siblings and workload.traces is None:
        raise WorkloadError("--siblings needs texts: rollout_telemetry.record_traces=true")
    if workload.traces is not None:
        with bar("reading texts") as progress:
            workload = workload.with_right(max(ks), progress)
    elif workload.chances is None:
        raise WorkloadError(
            "neither texts nor steps in which texts alone drafted (requests' open_steps) were "
            "recorded: record texts with rollout_telemetry.record_traces=true, or replay a run "
            "with sam=on"
        )
    with bar("simulating") as progress:
        outcomes = replay_settings(
            workload, table, _fleet(workload, replicas, max_num_seqs), thresholds, ks,
            siblings=siblings, captured=captured, pad=pad, tail_threshold=tail_threshold,
            models=models, progress=progress,
        )  # fmt: skip
    figures = {name: outcome.figures() for name, outcome in outcomes.items()}
    report.print_sides(figures, console)
    if picture is not None:
        report.plot_outcomes(outcomes, picture, tail_threshold)
    _write(output, {"step": workload.step, "responses": len(workload.round), "settings": figures})


def _models(
    acceptance: Sequence[float], runs: Sequence[Path], pass_cost: float | None
) -> list[ModelDrafts]:
    """The models to forecast; what a pass takes has to be said."""
    if pass_cost is None:
        if acceptance or runs:
            raise ValueError("--pass-cost: what a pass of the model takes of a decode step")
        return []
    found = [given_model(acceptance, pass_cost)] if acceptance else []
    found += [recorded_model(path, pass_cost) for path in runs]
    titles = [model.title for model in found]
    if not found:
        raise ValueError("--pass-cost: of which model? --model-acceptance or --model-run says")
    if len(set(titles)) < len(titles):
        raise ValueError(f"of each kind of model one at a time, not {', '.join(titles)}")
    return found


def _fleet(workload: Workload, replicas: int | None, max_num_seqs: int | None) -> Fleet:
    fleet = workload.fleet
    return Fleet(replicas or fleet.engines, max_num_seqs or fleet.max_num_seqs)


def check(console: Console, output: Path | None) -> int:
    """Predict the recorded rollouts again; 1 where one misses its target or none is recorded."""
    try:
        with bar("predicting recorded rollouts") as progress:
            rows = Validation(validation.RECORD, validation.TRACES).rows(progress)
    except ValidationError as error:
        console.print(f"no record: {error}", soft_wrap=True)
        return 1
    report.print_validation(rows, console)
    _write(output, {"rollouts": [dataclasses.asdict(row) for row in rows]})
    return 0 if all(row.reached for row in rows) else 1


def _table(path: Path, host_costs: Path | None, scheduling: str) -> CostTable:
    """A file of step costs, with the host's if they are given, or a run's engine steps.

    Raises:
        CostTableError: not such a file, or host costs that a run's steps contain already.
    """
    if not path.is_dir():
        table = CostTable.read(path)
        if host_costs is not None:
            table = HostCosts.read(host_costs, scheduling).added_to(table)
        return table
    if host_costs is not None:
        raise CostTableError(f"--host-costs: the steps that {path} recorded contain them already")
    folder = RunFolder(path)
    if model_of(folder):
        raise CostTableError(
            f"{path}: a model drafted in this run, and its passes are in every step: take the "
            "costs from a run with sam=on"
        )
    steps = folder.read("engine_steps").to_pandas()
    try:
        return CostTable.of_steps(steps[steps["split"] == "train"])
    except CostTableError as error:
        raise CostTableError(f"{path}, engine steps: {error}") from error


def _write(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        text = json.dumps(content, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
