"""From engine steps, requests and counters to the metrics of one training step.

The same functions serve the trainer while it runs and a reader of the run folder afterwards. What
each metric is, and how it follows from a `Rollout`, is declared in `schema.py`.

Two choices keep the figures additive. "Slowest" means one replica, the one with the largest busy
time, for every metric of a training step, so that bulk and tail add up to the rollout. The bulk is
every engine step outside the tail, steps that schedule nothing included.
"""

from collections.abc import Iterable, Mapping
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.sources import NAMES
from sam_rollout.telemetry.gain import seconds_without_drafts
from sam_rollout.telemetry.records import ENGINE_STEPS, REQUESTS
from sam_rollout.telemetry.schema import METRICS, named
from sam_rollout.telemetry.tables import numpy_column, of_split, ratio, tail_mask

# Counters of what engine steps do not tell and `gain` would have to know.
_HIDDEN_WORK = ("draft/padding_tokens", "draft/model_steps")


def aggregate(
    engine_steps: Iterable[pa.Table],
    requests: Iterable[pa.Table],
    *,
    tail_threshold: int,
    drafter_counters: Mapping[int, Mapping[str, float]] | None = None,
    split: str = "train",
) -> dict[str, float]:
    """Metrics of one training step, by full name, all of them finite.

    `engine_steps` and `requests` are the tables of all replicas for that training step; rows of
    another split are left out. `drafter_counters` maps replica -> metric without `sam/` -> what the
    step added; metrics that nobody counts, and counters that are no metric, are omitted. Where
    nothing happened metrics are 0, but for draft/acceptance_length, which is then 1: a step without
    drafts gives one token.
    """
    rollout = Rollout(
        of_split(pa.concat_tables([ENGINE_STEPS.empty_table(), *engine_steps]), split),
        of_split(pa.concat_tables([REQUESTS.empty_table(), *requests]), split),
        tail_threshold,
        _added_up((drafter_counters or {}).values()),
    )
    values = dict(rollout.counters)
    for metric in METRICS:
        value = metric.compute(rollout) if metric.compute is not None else None
        name = metric.name.removeprefix("sam/")
        if isinstance(value, Mapping):
            stem = name.partition("<")[0]
            values |= {f"{stem}{member}": one for member, one in value.items()}
        elif value is not None:
            values[name] = value
    return {name: float(value) for name, value in named(split, values).items()}


class Rollout:
    """What the engines recorded in one training step, for the functions that compute metrics.

    Every numeric column of `StepRecord` is an attribute, numpy [steps], ordered by replica, then
    time; 0 where it is null.

    Args:
        steps, requests: Tables of all replicas, of one split.
        tail_threshold: Most scheduled requests of a step in the long tail.
        counters: Of all replicas together, by metric without `sam/`.

    Attributes:
        requests, counters: As given.
        has_drafter, gate_open: bool [steps]; a gate without drafter is not open.
        slowest: bool [steps], of the replica with the largest busy time.
        tail, bulk: bool [steps], in the long tail and outside of it.
    """

    def __init__(
        self,
        steps: pa.Table,
        requests: pa.Table,
        tail_threshold: int,
        counters: Mapping[str, float] | None = None,
    ) -> None:
        self._steps = steps.sort_by([("replica", "ascending"), ("time_s", "ascending")])
        self.requests, self.counters = requests, counters or {}
        for field in ENGINE_STEPS:
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
                zero = pa.scalar(0, field.type)
                setattr(self, field.name, numpy_column(pc.fill_null(self._steps[field.name], zero)))
        gate_open = self._steps["gate_open"]
        self.has_drafter = numpy_column(pc.is_valid(gate_open))
        self.gate_open = numpy_column(pc.fill_null(gate_open, False))
        self.slowest = _slowest(self.replica, self.duration_s)
        self.tail = tail_mask(self.scheduled, self.waiting, self.prompt_tokens, tail_threshold)
        self.bulk = ~self.tail

    def __getattr__(self, name: str) -> np.ndarray:
        raise AttributeError(f"engine steps have no numeric column {name!r}")

    def sums(self, name: str) -> np.ndarray:
        """Sum over steps of a column of lists by index within the list, float [longest list]."""
        lists = self._steps[name]
        lengths = numpy_column(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        return np.bincount(position, weights=numpy_column(pc.list_flatten(lists)))

    def by_source(self, kind: str) -> dict[str, float]:
        """Draft tokens ("drafted" or "accepted") of every source."""
        return dict.fromkeys(NAMES, 0.0) | dict(
            zip(NAMES, self.sums(f"{kind}_per_source"), strict=False)
        )

    def counted_ratio(self, above: str, below: str, factor: float = 1.0) -> float | None:
        """The quotient of two counters; None where they are not counted."""
        if above not in self.counters:
            return None
        return factor * ratio(self.counters[above], self.counters[below])

    @property
    def requests_of_replica(self) -> np.ndarray:
        """Requests of each replica that had any."""
        by_replica = self.requests.group_by("replica").aggregate([([], "count_all")])
        return numpy_column(by_replica["count_all"])

    @cached_property
    def seconds_without_drafts(self) -> float | None:
        """What the slowest replica would have taken; see `telemetry.gain`."""
        if any(self.counters.get(name) for name in _HIDDEN_WORK):
            return None
        return seconds_without_drafts(self)


def _slowest(replica: np.ndarray, duration_s: np.ndarray) -> np.ndarray:
    """Mask of the replica with the largest busy time (the lowest number if several), [steps]."""
    if not len(replica):
        return np.zeros(0, dtype=bool)
    numbers, index = np.unique(replica, return_inverse=True)
    busy_s = np.bincount(index, weights=duration_s)  # [replicas]
    return replica == numbers[busy_s.argmax()]


def _added_up(counted: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counters of all replicas together."""
    totals: dict[str, float] = {}
    for counters in counted:
        for name, value in counters.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals
