"""A run folder as the report sees it: what the run was, and one row of metrics a training step."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sam_rollout.telemetry.records import RunFolder, RunFolderError, RunInfo


@dataclass(frozen=True)
class Run:
    """`starts` holds every start of the run; `steps` one row per training step, NaN if unknown."""

    path: Path
    starts: list[RunInfo]
    steps: pd.DataFrame  # index: training step, columns: metric names

    @property
    def training_steps(self) -> list[int]:
        """Steps with more than validation: the one before training has nothing to compare."""
        validation = self.steps.columns.str.match("val-|sam_val/")
        return list(self.steps.index[self.steps.loc[:, ~validation].notna().any(axis=1)])

    @property
    def label(self) -> str:
        """What the run calls itself, like "sam=on"."""
        return self.starts[0].label


def load_run(path: str | Path) -> Run:
    """Reads a run folder. Raises RunFolderError if something is missing or unreadable."""
    folder = RunFolder(path)
    starts = folder.read_starts()
    entries = folder.read_train_steps()
    if not entries:
        raise RunFolderError(f"{folder.train_steps_path}: expected at least one training step")
    return Run(folder.path, starts, pd.DataFrame.from_dict(entries, orient="index", dtype=float))


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
