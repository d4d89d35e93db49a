"""Estimates how long a rollout would have taken without drafts, from the rollout's engine steps.

Without drafts, a replica needs one step per token of its longest response. In step t, it samples
one token for each response of at least t tokens. If there are n such responses, the step's expected
time is the mean time of observed steps that computed n tokens, minus the drafter's time.

There is no estimate in these cases:

* Without drafts, a step would have more requests than any observed step has tokens, or fewer
  requests than every observed step has tokens.
* Fewer than `_SAMPLE` steps without prompt tokens were observed.
* Requests waited in the queue, or arrived after other requests had ended.
* Steps were padded, or a model drafted.

`tests/unit/telemetry/test_gain.py` compares estimates with measured pairs of runs.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_SAMPLE = 8  # A mean time is computed from at least this many engine steps.
# These counters count work that engine steps do not show, so its time cannot be estimated.
_HIDDEN_WORK = ("draft/padding_tokens", "draft/model_steps")


def seconds_without_drafts(rollout: Any) -> float | None:
    """Estimate the largest busy time (s) of a replica without drafts; None if it is unknown."""
    if any(map(rollout.counters.get, _HIDDEN_WORK)) or not rollout.draft_tokens.any():
        return None
    found = [_of_replica(rollout, replica) for replica in np.unique(rollout.replica)]
    known = [seconds for seconds in found if seconds is not None]
    return max(known) if len(known) == len(found) else None


def _of_replica(rollout: Any, replica: int) -> float | None:
    mine = rollout.replica == replica
    reads_prompt = rollout.prompt_tokens[mine] > 0
    decodes = ~reads_prompt & (rollout.scheduled[mine] > 0)
    requests = rollout.requests.filter(pc.equal(rollout.requests["replica"], replica))
    rows = _rows_without_drafts(requests)
    if rows is None or rollout.waiting[mine][decodes].any() or decodes.sum() < _SAMPLE:
        return None
    net_s = rollout.duration_s[mine] - 1e-6 * rollout.drafter_us[mine]
    tokens = (rollout.scheduled + rollout.draft_tokens)[mine][decodes]
    if len(rows) and not tokens.min() <= rows.min() <= rows.max() <= tokens.max():
        return None
    return float(net_s[~decodes].sum() + np.interp(rows, *_prices(tokens, net_s[decodes])).sum())


def _rows_without_drafts(requests: pa.Table) -> np.ndarray | None:
    """Return how many requests each decoding step would have without drafts, int [steps].

    Return None if, within a busy period, a request arrived after another request had ended.
    """
    if not requests.num_rows:
        return None
    requests = requests.sort_by("start_s")
    start_s, end_s, lengths = (
        requests[name].to_numpy() for name in ("start_s", "end_s", "response_tokens")
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
    """Put steps with similar numbers of tokens into groups.

    Return the mean number of tokens and the mean time of each group, [groups] each.
    """
    order = np.argsort(tokens, kind="stable")
    tokens, seconds = tokens[order], seconds[order]
    ends = np.flatnonzero(np.r_[tokens[1:] != tokens[:-1], True]) + 1
    ends = ends[ends >= _SAMPLE]
    starts = np.r_[0, ends[np.unique(ends // _SAMPLE, return_index=True)[1]][:-1]]
    counts = np.diff(np.r_[starts, len(tokens)])
    return np.add.reduceat(tokens, starts) / counts, np.add.reduceat(seconds, starts) / counts
