"""Metrics of runs that counted since their start, as what the counts rose by per step.

Such runs name their counters like those that are per step. They are told apart by drafted tokens,
which were per step always: counts by source that add up to more than these are running totals.
"""

import re

import pandas as pd

_OF_SOURCES = r"sam/draft/drafted_(?!context_|tokens$)\w+"
_DRAFTED = "sam/draft/drafted_tokens"
_COUNTERS = (
    r"sam/draft/(failures|record_failures|catch_up_tokens|proposed_tokens|drafter_steps|rebuilds"
    r"|evictions|padding_tokens|accepted_padding_tokens|(verify|drafted|accepted)_context_\d+"
    r"|(drafted|accepted)_(own|siblings|history|corpus)|siblings_(evictions|restarts)"
    r"|history_(groups_found|groups_missing|evictions|dropped|failures))"
)


def per_step(steps: pd.DataFrame) -> pd.DataFrame:
    """The metrics of a run (index: training step) with its counters per step.

    Validation is counted in the totals, too, under names of its own; its rise does not belong to
    the next step's rollout. A resumed run counts from zero again.
    """
    names = list(map(str, steps.columns))
    of_sources = [name for name in names if re.fullmatch(_OF_SOURCES, name)]
    if _DRAFTED not in names or not (steps[of_sources].sum(axis=1) > steps[_DRAFTED]).any():
        return steps
    changed = {}
    for name in filter(re.compile(_COUNTERS).fullmatch, names):
        of_validation = name.replace("sam/", "sam_val/", 1)
        told = {
            order: steps[known].dropna()
            for order, known in enumerate((name, of_validation))
            if known in names
        }
        totals = pd.concat(told).swaplevel().sort_index()  # by step, rollout before validation
        rise = totals.diff()
        rise = rise.where(rise >= 0, totals)  # the first value, and the first after a restart
        for order, known in enumerate((name, of_validation)):
            if order in told:
                changed[known] = rise.xs(order, level=1).reindex(steps.index)
    return steps.assign(**changed)
