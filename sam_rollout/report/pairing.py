"""Pairs the metrics of both sides by training step, and finds steps with complete records."""

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
        """The runs of BASE, followed by the runs of SAM."""
        return [*self.base, *self.sam]

    def names(self) -> set[str]:
        """Return the metrics that every run has."""
        return set.intersection(*(set(run.steps.columns) for run in self.runs))

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first metric of `names` for which at least one step has values of all runs."""
        known = self.names()
        return next(
            (name for name in names if name in known and len(self.every(name).dropna())), None
        )

    def every(self, name: str) -> pd.DataFrame:
        """Return a metric of all runs, a row per training step and a column per (side, name)."""
        return pd.DataFrame(
            {
                (side, run.name): run.values(name, self.steps)
                for side, runs in zip(SIDES, (self.base, self.sam), strict=True)
                for run in runs
            }
        )

    def sides(self, *names: str) -> list[Sides]:
        """Return the values of metrics over the steps for which every run has all of them."""
        frames = [self.every(name) for name in names]
        whole = pd.concat(frames, axis=1).notna().all(axis=1)
        paired = seeds_in_pairs(self.base, self.sam)
        known = [frame[whole] for frame in frames]
        return [
            Sides(frame["base"].to_numpy().T, frame["sam"].to_numpy().T, paired) for frame in known
        ]


def whole_steps(run: Run, rows: pd.DataFrame, steps: list[int]) -> list[int]:
    """Return the steps for which a table of the run's records has rows of all replicas.

    If the run lacks the metric of the number of replicas, every step with a row is returned.
    """
    replicas = rows.groupby("step")["replica"].nunique().reindex(steps, fill_value=0)
    whole = replicas > 0
    if _REPLICAS in run.steps:
        whole &= replicas >= run.steps[_REPLICAS].reindex(steps)  # false where that is NaN
    return [step for step in steps if whole[step]]
