"""Loads the runs of a comparison, and pairs the metrics of both sides by training step."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pandas as pd
import pyarrow as pa

from sam_rollout.core.statistics import Sides
from sam_rollout.telemetry.records import RunFolder, RunFolderError, RunInfo
from sam_rollout.telemetry.tables import of_split

SIDES = ("base", "sam")
_REPLICAS = "sam/engine/replicas"


@dataclass(frozen=True)
class Run:
    """One run."""

    path: Path
    starts: list[RunInfo]  # Descriptions of the run's start and of each resume, in order.
    steps: pd.DataFrame  # Indexed by training step and metric; NaN if unknown.
    problems: list[str]  # Sentences about files that could not be read.
    name: str = ""  # Name of the side, followed by a number if the side has several runs.

    @property
    def training_steps(self) -> list[int]:
        """The training steps that have recorded metrics besides those of validation."""
        # Column names become texts first, because an empty table has numeric names in pandas.
        # Our wandb logger adds training/global_step to the metrics of validation.
        idle = self.steps.columns.astype(str).str.match("val-|sam_val/|training/global_step$")
        return list(self.steps.index[self.steps.loc[:, ~idle].notna().any(axis=1)])

    @property
    def start(self) -> RunInfo:
        """The description of the first start."""
        return self.starts[0]

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row per finished training response."""
        return self._training_rows("requests").to_pandas()

    @property
    def traces(self) -> pd.DataFrame:
        """One row per training response, with token ids as arrays; each access reads the files."""
        return self._training_rows("traces").to_pandas()

    @cached_property
    def engine_steps(self) -> pa.Table:
        """One row per engine step of training."""
        return self._training_rows("engine_steps")

    def _training_rows(self, name: str) -> pa.Table:
        return of_split(RunFolder(self.path).read(name, self.problems), "train")


def load_run(path: str | Path) -> Run:
    """Read the run folder at `path`; damaged parts are left out and named in the run's `problems`.

    Raises:
        RunFolderError: `path` is no run folder, or has no training step.
    """
    folder, problems = RunFolder(path), list[str]()
    starts, steps = folder.read_starts(), folder.read_train_steps(problems)
    if not steps:
        raise RunFolderError(f"{folder.train_steps_path}: expected at least one training step")
    return Run(folder.path, starts, pd.DataFrame.from_dict(steps, "index", float), problems)


def load_side(side: str, paths: Iterable[str | Path]) -> list[Run]:
    """Load the runs of a side, "BASE" or "SAM", and name them after the side."""
    runs = list(map(load_run, paths))
    if len(runs) == 1:
        return [replace(runs[0], name=side)]
    return [replace(run, name=f"{side} {number}") for number, run in enumerate(runs, start=1)]


def seeds_in_pairs(base: list[Run], sam: list[Run]) -> bool:
    """Return whether both sides have the same seeds in the same order.

    The result is false if a side has only one run, or two runs with equal seeds.
    """
    seeds = [run.start.seeds for run in base]
    known = len(base) > 1 and all(seeds)
    alone = all(seeds.count(own) == 1 for own in seeds)
    return known and alone and seeds == [run.start.seeds for run in sam]


def partners(base: list[Run], sam: list[Run]) -> list[tuple[int, int]]:
    """Match runs of both sides by equal seeds, and the other runs in order; return indices."""
    left, found = list(range(len(sam))), {}
    for place, run in enumerate(base):
        for other in left:
            if run.start.seeds and run.start.seeds == sam[other].start.seeds:
                found[place] = other
                left.remove(other)
                break
    alone = [place for place in range(len(base)) if place not in found]
    return sorted([*found.items(), *zip(alone, left, strict=False)])


def held_out_names(columns: Iterable[str]) -> list[str]:
    """Return the metrics of held-out accuracy among the names in `columns`."""
    names = sorted(columns)
    for prefix in ("val-core", "val-aux"):
        found = [name for name in names if re.fullmatch(rf"{prefix}/.+/acc/mean@\d+", name)]
        if found:
            return found
    return []


@dataclass(frozen=True)
class Both:
    """The runs of both sides, and the training steps in which the runs are compared."""

    base: list[Run]
    sam: list[Run]
    steps: list[int]

    @property
    def runs(self) -> list[Run]:
        """The runs of BASE, followed by the runs of SAM."""
        return [*self.base, *self.sam]

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first metric in `names` that has values of all runs in at least one step."""
        return next((name for name in names if len(self.every(name).dropna())), None)

    def every(self, name: str) -> pd.DataFrame:
        """Return a metric, NaN if unknown: one row per step and one column per (side, run)."""
        sides = zip(SIDES, (self.base, self.sam), strict=True)
        runs = {(side, run.name): run.steps for side, some in sides for run in some}
        known = {key: steps.get(name, pd.Series(dtype=float)) for key, steps in runs.items()}
        return pd.DataFrame(known, index=self.steps)

    def sides(self, *names: str) -> list[Sides]:
        """Return the values of metrics in the steps for which every run has all these metrics."""
        frames = [self.every(name) for name in names]
        whole = pd.concat(frames, axis=1).notna().all(axis=1)
        paired = seeds_in_pairs(self.base, self.sam)
        known = [frame[whole] for frame in frames]
        return [Sides(one["base"].to_numpy().T, one["sam"].to_numpy().T, paired) for one in known]


def whole_steps(run: Run, rows: pd.DataFrame, steps: list[int]) -> list[int]:
    """Return the steps for which a table of the run's records has rows of all replicas.

    If the run did not record the number of replicas, all steps with rows are returned.
    """
    replicas = rows.groupby("step")["replica"].nunique().reindex(steps, fill_value=0)
    whole = replicas > 0
    if _REPLICAS in run.steps:
        whole &= replicas >= run.steps[_REPLICAS].reindex(steps)  # false where the metric is NaN
    return [step for step in steps if whole[step]]
