"""What a rollout would have taken without drafts, from its own engine steps.

Rows without drafts get one token a step, so a replica's busy period would have had as many steps
as its longest response has tokens, with as many rows in each as responses are that long. Such a
step is priced by what engine steps of the same training step took that computed as many tokens,
drafts included, less the drafter's time: a draft of n tokens counts as n rows. (Steps without any
draft are too few for a price, and too far apart in time: on a machine whose speed drifts they were
off by up to 1.4 times.)

Nothing is extrapolated: there is no figure if a step would have had fewer rows than the smallest
observed step has tokens. Nor is there one where the records cannot tell: requests that waited for a
place or arrived when others had ended, tokens that only filled steps up, drafts of a model, whose
time is not in the drafter's.

In the recorded runs of `benchmarks/results/runs` every figure lies within the 95 % interval of the
three pairs of runs with and without drafts, at the same training step: within some 20 % of a pair
(`tests/unit/telemetry/test_gain.py`). The engine without a drafter may also schedule otherwise
(asynchronously), which the figure does not know.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.telemetry.tables import numpy_column

_SAMPLE = 8  # engine steps that a price is the mean of, at least


def seconds_without_drafts(rollout: Any) -> float | None:
    """Estimate the busy time of the slowest replica without drafts; None where it is not known.

    Args:
        rollout: The `Rollout` of `aggregate`.
    """
    if not rollout.draft_tokens.any():
        return None
    found = [_of_replica(rollout, replica) for replica in np.unique(rollout.replica)]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) if len(known) == len(found) else None


def _of_replica(rollout: Any, replica: int) -> float | None:
    mine = rollout.replica == replica
    reads_prompt = rollout.prompt_tokens[mine] > 0
    decodes = ~reads_prompt & (rollout.scheduled[mine] > 0)
    rows = _rows_without_drafts(
        rollout.requests.filter(pc.equal(rollout.requests["replica"], replica))
    )
    if rows is None or rollout.waiting[mine][decodes].any() or decodes.sum() < _SAMPLE:
        return None
    net_s = rollout.duration_s[mine] - 1e-6 * rollout.drafter_us[mine]
    tokens = (rollout.scheduled + rollout.draft_tokens)[mine][decodes]
    if len(rows) and not tokens.min() <= rows.min() <= rows.max() <= tokens.max():
        return None
    return float(net_s[~decodes].sum() + np.interp(rows, *_prices(tokens, net_s[decodes])).sum())


def _rows_without_drafts(requests: pa.Table) -> np.ndarray | None:
    """Rows of every step after the first tokens, over a replica's busy periods, int [steps].

    None if there are no requests, or one arrived when others of its period had ended: its place
    among their steps is not known.
    """
    if not requests.num_rows:
        return None
    requests = requests.sort_by("start_s")
    start_s, end_s, lengths = (
        numpy_column(requests[name]) for name in ("start_s", "end_s", "response_tokens")
    )
    busy_until_s = np.maximum.accumulate(end_s)
    begins = 1 + np.flatnonzero(start_s[1:] > busy_until_s[:-1])
    rows = []
    for period in np.split(np.arange(len(start_s)), begins):
        if start_s[period].max() > end_s[period].min():
            return None
        ordered = np.sort(lengths[period])
        step = np.arange(1, ordered[-1])
        rows.append(len(ordered) - np.searchsorted(ordered, step, side="right"))
    return np.concatenate(rows)


def _prices(tokens: np.ndarray, seconds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean tokens and mean seconds of samples of steps that are alike in tokens."""
    order = np.argsort(tokens, kind="stable")
    tokens, seconds = tokens[order], seconds[order]
    # A sample ends with the last step of a number of tokens, as soon as it is large enough.
    ends = np.flatnonzero(np.r_[tokens[1:] != tokens[:-1], True]) + 1
    ends = ends[ends >= _SAMPLE]
    starts = np.r_[0, ends[np.unique(ends // _SAMPLE, return_index=True)[1]][:-1]]
    counts = np.diff(np.r_[starts, len(tokens)])
    return np.add.reduceat(tokens, starts) / counts, np.add.reduceat(seconds, starts) / counts
