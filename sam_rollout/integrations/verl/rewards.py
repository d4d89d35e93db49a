"""Checks the results of a reward function, and prepares them for verl's metrics.

A reward returns a number, or a dict with ``score`` and further entries to log. verl assumes that
all entries are numbers. A reward that cannot judge a response returns None.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sam_rollout.integrations.verl.failures import FilterMetricError

# Entry of the reward's extra info that is 1 for a right answer; the filter may use another entry.
ACCURACY = "acc"
ANSWER = "pred"  # entry with the response's answer, for verl's majority votes
SCORE = "reward"  # verl's name of the score, which every response has
METRIC_FIELD = "algorithm.filter_groups.metric"


class UnjudgedError(ValueError):
    """A response cannot be used because its reward is not a number."""


def figure(value: Any) -> float | None:
    """Return a value as a float; None if the value is not a finite number."""
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several numbers
        return None
    return number if math.isfinite(number) else None


def check_reward(score: Any, extra: Mapping[str, Any], metric: str | None) -> None:
    """Refuse a reward whose score, or whose value for the filter, is not a number.

    `extra` is the reward's extra info. `metric` is the name of the entry that groups are filtered
    by; None if nothing is filtered.

    Raises:
        UnjudgedError: The score or metric of this response is not a number.
        FilterMetricError: The reward does not return the metric.
    """
    if figure(score) is None:
        raise UnjudgedError(f"the reward gave score = {score!r}: must be a number")
    if metric is None or metric == SCORE:
        return
    if metric not in extra:
        given = ", ".join(sorted(extra)) or "none"
        raise FilterMetricError(
            f"{METRIC_FIELD} = {metric!r}: the reward does not return it; it returns: {given} "
            f"({SCORE!r}, the score, always exists)"
        )
    if figure(extra[metric]) is None:
        raise UnjudgedError(
            f"{METRIC_FIELD} = {metric!r}: the reward gave {extra[metric]!r} for a response, "
            "which must be a number to filter by"
        )


def computable(columns: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return a validation's columns with values that verl's metrics can use.

    verl skips the value None, and a column whose first value is text. Other values must be numbers.
    """
    clean: dict[str, list[Any]] = {}
    for name, values in columns.items():
        if name == ANSWER:  # verl compares answers as text
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
    """Return the number of responses from which each validation prompt's accuracy is computed.

    If the reward could not judge a response (accuracy None), verl would count the response as
    wrong. Here, such responses are left out. The keys of `expected` are pairs (data source, id of
    the prompt).
    """
    rows = zip(sources, uids, accuracies, strict=True)
    unjudged = Counter((str(source), str(uid)) for source, uid, acc in rows if acc is None)
    return {key: count - unjudged[key] for key, count in expected.items()}
