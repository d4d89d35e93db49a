"""What a reward says of a response: checked where it arrives, and read where it is counted.

A reward returns a number, or a dict with ``score`` and whatever else it wants logged. verl takes
for granted that all of it can be computed with; a reward that cannot judge a response says None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sam_rollout.integrations.verl.failures import FilterMetricError

# A response's entry in the reward's extra info that is 1 when its answer is right. Not the filter's
# metric, which may be another or none.
ACCURACY = "acc"
ANSWER = "pred"  # what verl takes a majority of
SCORE = "reward"  # verl's name for what is trained on, which no dict has to give
METRIC_FIELD = "algorithm.filter_groups.metric"


class UnjudgedError(ValueError):
    """A response that cannot be used: its reward is no number."""


def figure(value: Any) -> float | None:
    """What a reward says of a response as a number; None where it says nothing that is one."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # the last: a tensor of several numbers
        return None
    return number if math.isfinite(number) else None


def check_reward(score: Any, extra: Mapping[str, Any], metric: str | None) -> None:
    """Refuse a reward that a response cannot be trained on, or its group not be filtered by.

    Args:
        score: What is trained on.
        extra: What the reward gave besides.
        metric: What groups are filtered by; None where they are not.

    Raises:
        UnjudgedError: This response has no number there; others may have.
        FilterMetricError: No response will have it.
    """
    if figure(score) is None:
        raise UnjudgedError(f"the reward gave score = {score!r}: must be a number")
    if metric is None or metric == SCORE:
        return
    if metric not in extra:
        given = ", ".join(sorted(extra)) or "none"
        raise FilterMetricError(
            f"{METRIC_FIELD} = {metric!r}: no reward gives it; there are: {given} "
            f"({SCORE!r} is always there: what is trained on)"
        )
    if figure(extra[metric]) is None:
        raise UnjudgedError(
            f"{METRIC_FIELD} = {metric!r}: the reward gave {extra[metric]!r} for a response, "
            "which must be a number to filter by"
        )


def computable(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """A validation's columns as verl's metrics can compute with them.

    verl leaves out None, and whole columns that begin with text. All else must be numbers.
    """
    clean: dict[str, list[Any]] = {}
    for name, values in columns.items():
        if name == ANSWER:  # compared, not added up
            clean[name] = [None if value is None else str(value) for value in values]
        elif all(value is None or isinstance(value, str) for value in values):
            clean[name] = list(values)
        else:
            clean[name] = [None if isinstance(v, str) else figure(v) for v in values]
    return clean


def judged_counts(
    expected: Mapping[tuple[str, str], int],
    sources: Sequence[Any],
    uids: Sequence[Any],
    accuracies: Sequence[Any],
) -> dict[tuple[str, str], int]:
    """How many responses to each prompt of a validation count for its accuracy.

    verl takes what is missing for wrong. That is right of responses that failed, and not of those
    that the reward could not judge.

    Args:
        expected: Data source and prompt -> responses that were asked for.
        sources, uids, accuracies: Of each response that came.
    """
    rows = zip(sources, uids, accuracies, strict=True)
    unjudged = Counter((str(source), str(uid)) for source, uid, acc in rows if acc is None)
    return {key: count - unjudged[key] for key, count in expected.items()}
