"""The commands `simulate` and `plan`: files in, tables, pictures and JSON out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sam_rollout.bench.traces import TraceError
from sam_rollout.doctor.experiment import ExperimentError, compose
from sam_rollout.simulation import program, report
from sam_rollout.simulation.costs import CostTable, CostTableError
from sam_rollout.simulation.planner import KS, Planner
from sam_rollout.simulation.published import SETUPS
from sam_rollout.simulation.recorded import RecordError
from sam_rollout.simulation.rollout import Fleet
from sam_rollout.simulation.validation import ValidationError
from sam_rollout.simulation.workload import Workload, WorkloadError, read_workload
from sam_rollout.telemetry.records import RunFolder

if TYPE_CHECKING:
    from rich.console import Console

ERRORS = (
    TraceError, ExperimentError, CostTableError, RecordError, ValidationError, WorkloadError,
    ValueError,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Replay:
    """Options of a replay; see the command's help."""

    path: Path
    calibration: Path
    step: int | None
    replicas: int | None
    max_num_seqs: int | None
    thresholds: tuple[int, ...]
    ks: tuple[int, ...]
    siblings: bool
    captured: tuple[int, ...] | None
    pad: bool
    tail_threshold: int


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar, called with what is done and what there is to do."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def replay(options: Replay, console: Console, picture: Path | None, output: Path | None) -> None:
    """Replay a recorded step under several settings."""
    table = _table(options.calibration)
    workload = read_workload(options.path, options.step)
    if options.siblings and workload.traces is None:
        raise WorkloadError("--siblings needs texts: rollout_telemetry.record_traces=true")
    if workload.traces is not None:
        with bar("reading texts") as progress:
            workload = workload.with_right(max(options.ks), progress)
    elif workload.chances is None:
        raise WorkloadError(
            "neither texts nor steps with an open gate (requests' open_steps) were recorded: "
            "record texts with rollout_telemetry.record_traces=true, or replay a run with sam=on"
        )
    with bar("simulating") as progress:
        outcomes = program.replay_settings(
            workload, table, _fleet(workload, options.replicas, options.max_num_seqs),
            options.thresholds, options.ks, siblings=options.siblings, captured=options.captured,
            pad=options.pad, tail_threshold=options.tail_threshold, progress=progress,
        )  # fmt: skip
    figures = {name: outcome.figures() for name, outcome in outcomes.items()}
    report.print_sides(figures, console)
    if picture is not None:
        report.plot_outcomes(outcomes, picture, options.tail_threshold)
    _write(output, {"step": workload.step, "responses": len(workload.round), "settings": figures})


def _fleet(workload: Workload, replicas: int | None, max_num_seqs: int | None) -> Fleet:
    fleet = workload.fleet
    return Fleet(replicas or fleet.engines, max_num_seqs or fleet.max_num_seqs)


def published(name: str, console: Console, picture: Path | None, output: Path | None) -> None:
    """A published setup on paper, with sensitivities and what more sources would add."""
    if name not in SETUPS:
        raise ValueError(f"experiment={name}: published figures are known of {', '.join(SETUPS)}")
    with console.status("fitting the baseline of Qwen3-32B"):
        paper = program.on_paper(_composed)
    _print_fit(paper, console)
    with console.status(f"predicting {name}"):
        found = program.study(paper, name)
    report.print_predictions(found.predictions, console)
    report.print_tail(found.tail_factor, console)
    report.print_sensitivities(name, found.sensitivities, console)
    console.print(
        "Simulated throughout, on generated texts; half of the variance of lengths is taken to be "
        "common to siblings; rows in full graphs are bounds, nothing but memory traffic being left "
        "of a captured step:"
    )
    report.print_sides(found.figures(), console)
    if picture is not None:
        chosen = ("baseline", "published drafter", "own + siblings, spread",
                  "own + siblings, grouped", "own + history")  # fmt: skip
        outcomes = {title: found.sources[title][0] for title in chosen}
        report.plot_outcomes(outcomes, picture, paper.setups[name].sam.gate.threshold)
    _write(output, found.to_json())


def _print_fit(paper: program.OnPaper, console: Console) -> None:
    fit = paper.fit
    times = paper.times("article_32b", None)
    console.print(
        "Fitted on three baseline figures of Qwen3-32B (3904.22 s, 4159.06 s, long tail 1435 s): "
        f"{1000 * fit.layer_s:.3f} ms a layer, sigma of log length {fit.sigma:.2f}, "
        f"{fit.capped_share:.2%} of the responses up to the limit. Reproduced: "
        f"{times.mean_s:.0f} s, {times.rollout_s:.0f} s, {times.tail_s:.0f} s."
    )
    assumed = ", ".join(
        f"{name} {value}" for name, value in dataclasses.asdict(paper.assumed).items()
    )
    console.print(f"Assumed: {assumed}.")


def check(console: Console, output: Path | None) -> int:
    """Exit status: 1 where a target is missed that is no known miss, or a record is missing."""
    from rich.table import Table

    with bar("predicting recorded rollouts") as progress:
        findings, rows, predictions, tail = program.check(_composed, progress)
    if rows:
        report.print_validation(rows, console)
    report.print_predictions(predictions, console)
    report.print_tail(tail, console)
    table = Table("target", "found", "verdict")
    for finding in findings:
        missed = f"missed, because {finding.reason}" if finding.reason else "MISSED"
        table.add_row(finding.target, finding.found, "ok" if finding.reached else missed)
    console.print(table)
    for finding in findings:
        if finding.failed:
            console.print(f"failed: {finding.target}: {finding.found}", soft_wrap=True)
    _write(output, {"findings": [dataclasses.asdict(finding) for finding in findings]})
    return 1 if any(finding.failed for finding in findings) else 0


def plan(
    traces: Path, calibration: Path, step: int | None, replicas: int | None,
    max_num_seqs: int | None, resamples: int, output: Path | None, json_path: Path | None,
    console: Console,
) -> None:  # fmt: skip
    """Recommend a configuration."""
    table = _table(calibration)
    workload = read_workload(traces, step)
    with bar("reading texts") as progress:
        workload = workload.with_right(max(KS), progress)
    fleet = _fleet(workload, replicas, max_num_seqs)
    with bar("trying candidates") as progress:
        planner = Planner(workload, table, fleet)
        found = planner.plan(resamples, progress)
    report.print_plan(found, console)
    if planner.left_out:
        console.print(
            f"{planner.left_out} pairs of k and threshold were left out: the cost table has no "
            "verify steps with as many drafts and requests."
        )
    fragment = found.fragment()
    console.print(fragment, markup=False, highlight=False)
    if output is not None:
        output.write_text(fragment, encoding="utf-8")
    _write(json_path, {"plan": found.options(), **dataclasses.asdict(found)})


def _table(path: Path) -> CostTable:
    """A file of step costs, or the engine steps that a run recorded."""
    if not path.is_dir():
        return CostTable.read(path)
    steps = RunFolder(path).read("engine_steps").to_pandas()
    try:
        return CostTable.of_steps(steps[steps["split"] == "train"])
    except CostTableError as error:
        raise CostTableError(f"{path}, engine steps: {error}") from error


def _composed(name: str) -> Mapping[str, Any]:
    return compose(f"experiment={name}")[0]


def _write(path: Path | None, content: Mapping[str, Any]) -> None:
    if path is not None:
        text = json.dumps(content, indent=1, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
