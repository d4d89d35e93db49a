"""A run as the report sees it: its starts, its metrics by training step, its records."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from sam_rollout.telemetry.records import RunFolder, RunFolderError, RunInfo
from sam_rollout.telemetry.tables import of_split


@dataclass(frozen=True)
class Run:
    """One run.

    `starts` holds what every start said of itself, the first one first, `steps` one row a training
    step, NaN if unknown. `problems` says in words what of the run's files could not be read. `name`
    is that of its side, numbered where that has several.
    """

    path: Path
    starts: list[RunInfo]
    steps: pd.DataFrame  # index: training step, columns: metric names
    problems: list[str]
    name: str = ""

    @property
    def training_steps(self) -> list[int]:
        """Steps with more than validation: the one before training has nothing to compare."""
        # Without any metric pandas numbers the columns. Our wandb logger gives validation its step.
        idle = self.steps.columns.astype(str).str.match("val-|sam_val/|training/global_step$")
        return list(self.steps.index[self.steps.loc[:, ~idle].notna().any(axis=1)])

    def values(self, name: str, steps: list[int]) -> pd.Series:
        """A metric over `steps`, NaN where it is unknown."""
        return self.steps.reindex(index=steps, columns=[name])[name]

    @property
    def start(self) -> RunInfo:
        """The first start."""
        return self.starts[0]

    @property
    def label(self) -> str:
        """What the run calls itself, like "sam=on"."""
        return self.start.label

    @cached_property
    def requests(self) -> pd.DataFrame:
        """One row a finished response of training."""
        return self._training_rows("requests").to_pandas()

    @property
    def traces(self) -> pd.DataFrame:
        """One row a response of training, token ids as arrays; read again every time.

        Texts of a large run take gigabytes, 4 bytes a token: they are not kept.
        """
        return self._training_rows("traces").to_pandas()

    @cached_property
    def engine_steps(self) -> pa.Table:
        """One row an engine step of training."""
        return self._training_rows("engine_steps")

    def _training_rows(self, name: str) -> pa.Table:
        return of_split(RunFolder(self.path).read(name, self.problems), "train")


def load_run(path: str | Path) -> Run:
    """Reads the run folder at `path`; what is damaged in its logs is left out and named.

    Raises RunFolderError if it is none, or has no training step.
    """
    folder, problems = RunFolder(path), list[str]()
    starts, steps = folder.read_starts(), folder.read_train_steps(problems)
    if not steps:
        raise RunFolderError(f"{folder.train_steps_path}: expected at least one training step")
    return Run(folder.path, starts, pd.DataFrame.from_dict(steps, "index", float), problems)


def load_side(side: str, paths: Iterable[str | Path]) -> list[Run]:
    """The runs of "BASE" or "SAM", with their names."""
    runs = list(map(load_run, paths))
    if len(runs) == 1:
        return [replace(runs[0], name=side)]
    return [replace(run, name=f"{side} {number}") for number, run in enumerate(runs, start=1)]


def flat(mapping: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Nested mappings as one with dotted names."""
    found: dict[str, Any] = {}
    for name, value in mapping.items():
        full = f"{above}{name}"
        found |= flat(value, f"{full}.") if isinstance(value, Mapping) else {full: value}
    return found


def seeds_in_pairs(base: list[Run], sam: list[Run]) -> bool:
    """Whether repeats are pairs: run n of both sides has the same seeds, and no other run has."""
    seeds = [run.start.seeds for run in base]
    known = len(base) > 1 and all(seeds)
    alone = all(seeds.count(own) == 1 for own in seeds)
    return known and alone and seeds == [run.start.seeds for run in sam]


def partners(base: list[Run], sam: list[Run]) -> list[tuple[int, int]]:
    """Places of the runs to be laid beside each other: those of the same seeds, then in order."""
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
    """The trainer's metrics of held-out accuracy among `columns`.

    verl names them val-core/<data source>/acc/mean@<n>, or val-aux/... when the data set's main
    figure is another one.
    """
    names = sorted(columns)
    for prefix in ("val-core", "val-aux"):
        found = [name for name in names if re.fullmatch(rf"{prefix}/.+/acc/mean@\d+", name)]
        if found:
            return found
    return []
