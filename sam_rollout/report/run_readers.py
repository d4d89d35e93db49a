"""Reads runs: our run folder, and what a logger of verl left of a run without us.

A run folder holds everything a comparison asks for; the loggers hold metrics alone, wandb the
configuration, too.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa

from sam_rollout.report.runs import Run, Start
from sam_rollout.report.wandb_log import read_log
from sam_rollout.telemetry.records import RunFolder, RunFolderError, VersionError, value_at
from sam_rollout.telemetry.schema import todays_name

_Steps = Mapping[int, Mapping[str, Any]]  # step -> metric -> value


class Reader(NamedTuple):
    """One format: where it lies below a run's path, and what makes a run of it."""

    name: str
    patterns: tuple[str, ...]  # the last one tells a reader where it is looked for
    read: Callable[[Path, Path], Run]  # of what was found, and the run's path

    def find(self, path: Path) -> Path | None:
        """The newest match below `path`, or `path` itself; wandb names folders by the time."""
        if path.is_file():
            return path if path.suffix == Path(self.patterns[-1]).suffix else None
        found = (match for pattern in self.patterns for match in path.glob(pattern))
        return max(found, key=lambda match: match.parent.name, default=None)


def load_run(path: str | Path) -> Run:
    """Reads the run at `path`: a run folder, or what a logger of verl left of one.

    Raises RunFolderError if there is nothing readable, naming what was looked for.
    """
    path = Path(path)
    for reader in READERS:
        if found := reader.find(path):
            return reader.read(found, path)
    looked_for = ", or ".join(f"{reader.patterns[-1]} ({reader.name})" for reader in READERS)
    what = f"{path}: no run in it" if path.exists() else f"no folder {path}"
    raise RunFolderError(f"{what}: expected {looked_for}")


def _run_folder(found: Path, path: Path) -> Run:
    """Without run.json the run stays undescribed, with torn logs it is cut."""
    folder = RunFolder(path)
    problems: list[str] = []
    try:
        infos = folder.read_starts()
    except VersionError:
        raise
    except RunFolderError as error:
        infos = []
        problems.append(str(error))
    entries = folder.read_train_steps(problems)
    if not entries:
        raise RunFolderError(f"{folder.train_steps_path}: expected at least one training step")

    def read_table(name: str, problems: list[str]) -> pa.Table:
        return folder.read(name, problems)

    starts = [
        Start(info.config, info.versions, info.seeds, info.host, info.started_at, info.git)
        for info in infos
    ]
    label = infos[0].label if infos else path.name
    return Run(path, "run folder", label, starts, _frame(entries), problems, read_table)


def _wandb(found: Path, path: Path) -> Run:
    """The newest log below the path."""
    problems: list[str] = []
    steps, config, start = read_log(found, problems)
    if not steps:
        raise RunFolderError(f"{found}: expected metrics of at least one step")
    others = sorted({log for pattern in _WANDB for log in path.glob(pattern)} - {found})
    problems += [f"{log.parent.name}/{log.name}: an earlier log, left out" for log in others]
    places = {"rollout": "actor_rollout_ref.rollout.seed", "data": "data.seed"}
    seeds = {name: value_at(config, place) for name, place in places.items()}
    seeds = {name: seed for name, seed in seeds.items() if seed is not None}
    label = value_at(config, "trainer.experiment_name", path.name)
    starts = [Start(config=config or None, seeds=seeds or None, started_at=start)]
    return Run(path, "wandb, offline", label, starts, _frame(steps), problems)


def _file_logger(found: Path, path: Path) -> Run:
    """Verl's file logger writes a JSON line a step: {"step": int, "data": {metric: value}}."""
    steps: dict[int, dict[str, Any]] = {}
    problems = []
    for number, line in enumerate(found.read_bytes().splitlines(), start=1):
        try:
            entry = json.loads(line)
            steps.setdefault(int(entry["step"]), {}).update(entry["data"])
        except (ValueError, KeyError, TypeError):
            problems.append(f"{found.name}, line {number}: unreadable, left out")
    if not steps:
        raise RunFolderError(f'{found}: expected lines {{"step": int, "data": {{metric: value}}}}')
    label = found.absolute().parent.name if found.name == "metrics.jsonl" else found.stem
    return Run(path, "verl's file logger", label, [], _frame(steps), problems)


def _tensorboard(found: Path, path: Path) -> Run:
    """Every scalar, in single precision; a torn event file ends where it was torn."""
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError as error:
        raise RunFolderError(f"{path}: reading it needs the package tensorboard") from error
    events = EventAccumulator(str(found.parent), size_guidance={"scalars": 0})  # 0: keep all
    try:
        events.Reload()
    except Exception as error:  # it raises whatever its protocol buffers do
        raise RunFolderError(f"{found.parent}: TensorBoard cannot read it: {error}") from error
    steps: dict[int, dict[str, Any]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):  # in order of time: a step done again counts
            steps.setdefault(event.step, {})[name] = event.value
    if not steps:
        raise RunFolderError(f"{found.parent}: expected scalars in the event files")
    return Run(path, "TensorBoard", path.absolute().name, [], _frame(steps))


def _frame(steps: _Steps) -> pd.DataFrame:
    """Metrics by training step; what is not a number is left out."""
    numbers = {
        step: {
            todays_name(name): float(value)
            for name, value in metrics.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for step, metrics in sorted(steps.items())
    }
    return pd.DataFrame.from_dict(numbers, orient="index", dtype=float).sort_index()


_WANDB = ("run-*.wandb", "offline-run-*/run-*.wandb", "wandb/offline-run-*/run-*.wandb")
_EVENTS = "events.out.tfevents.*"
# In the order of how much a format tells: the first that is found is read.
READERS = (
    Reader("run folder", ("sam",), _run_folder),
    Reader("wandb, offline", _WANDB, _wandb),
    Reader("verl's file logger", ("metrics.jsonl",), _file_logger),
    Reader("TensorBoard", (_EVENTS, f"tensorboard/{_EVENTS}"), _tensorboard),
)
