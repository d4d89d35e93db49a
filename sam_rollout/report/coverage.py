"""Which training steps a run kept whole records of.

A file that is damaged, or records that were lost on their way, say nothing about what the run did:
what is not there must not be told as a difference.
"""

import pandas as pd

from sam_rollout.report.runs import Run

_REPLICAS = "sam/engine/replicas"


def whole_steps(run: Run, rows: pd.DataFrame, steps: list[int]) -> list[int]:
    """Those of `steps` that `rows`, of one of the run's tables, hold the rows of all replicas of.

    A step whose metrics of the engines were lost, too, is not whole. Where the run's log has no
    such metrics at all, one row of a step is taken for all of them.
    """
    replicas = rows.groupby("step")["replica"].nunique().reindex(steps, fill_value=0)
    whole = replicas > 0
    if _REPLICAS in run.steps:
        whole &= replicas >= run.steps[_REPLICAS].reindex(steps)  # false where that is NaN
    return [step for step in steps if whole[step]]


def common_steps(runs: list[Run], steps: list[int]) -> list[int]:
    """Those of `steps` that every run kept whole records of its requests of."""
    whole = [set(whole_steps(run, run.requests, steps)) for run in runs]
    return sorted(set.intersection(*whole))
