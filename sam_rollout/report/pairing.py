"""The metrics of both sides over the same training steps, and which steps have whole records.

A file that is damaged, or records that were lost on their way, say nothing about what the run did:
what is not there must not be told as a difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sam_rollout.core.statistics import Sides
from sam_rollout.report.runs import Run, seeds_in_pairs

SIDES = ("base", "sam")
_REPLICAS = "sam/engine/replicas"


@dataclass(frozen=True)
class Both:
    """The runs of both sides and the steps over which they are compared."""

    base: list[Run]
    sam: list[Run]
    steps: list[int]

    @property
    def runs(self) -> list[Run]:
        """The runs of BASE, then those of SAM."""
        return [*self.base, *self.sam]

    def names(self) -> set[str]:
        """Metrics that every run carries."""
        return set.intersection(*(set(run.steps.columns) for run in self.runs))

    def first(self, names: Sequence[str]) -> str | None:
        """The first of the metrics that every run has a value of in some common step."""
        known = self.names()
        return next(
            (name for name in names if name in known and len(self.every(name).dropna())), None
        )

    def every(self, name: str) -> pd.DataFrame:
        """Columns (side, name of the run), index training step; NaN where it is unknown."""
        return pd.DataFrame(
            {
                (side, run.name): run.values(name, self.steps)
                for side, runs in zip(SIDES, (self.base, self.sam), strict=True)
                for run in runs
            }
        )

    def sides(self, *names: str) -> list[Sides]:
        """Values of metrics over the steps of which every run knows all of them."""
        frames = [self.every(name) for name in names]
        whole = pd.concat(frames, axis=1).notna().all(axis=1)
        paired = seeds_in_pairs(self.base, self.sam)
        known = [frame[whole] for frame in frames]
        return [
            Sides(frame["base"].to_numpy().T, frame["sam"].to_numpy().T, paired) for frame in known
        ]


def whole_steps(run: Run, rows: pd.DataFrame, steps: list[int]) -> list[int]:
    """The steps of which `rows`, a table of the run's records, hold the rows of all replicas.

    A step whose metrics of the engines were lost, too, is not whole. Where the run's log has no
    such metrics at all, one row of a step is taken for all of them.
    """
    replicas = rows.groupby("step")["replica"].nunique().reindex(steps, fill_value=0)
    whole = replicas > 0
    if _REPLICAS in run.steps:
        whole &= replicas >= run.steps[_REPLICAS].reindex(steps)  # false where that is NaN
    return [step for step in steps if whole[step]]
