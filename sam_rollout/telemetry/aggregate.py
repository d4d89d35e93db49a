"""Computes the metrics of one training step from engine steps, requests and counters.

`schema.py` declares each metric and how the metric is computed from a `Rollout`.
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
from sam_rollout.telemetry.tables import of_split, ratio, tail_mask


def aggregate(
    engine_steps: Iterable[pa.Table],
    requests: Iterable[pa.Table],
    *,
    tail_threshold: int,
    counters: Iterable[Mapping[str, float]] = (),
    split: str = "train",
) -> dict[str, float]:
    """Return the metrics of one training step, by full name; all values are finite.

    Without engine steps, the metrics computed from them are 0, except draft/acceptance_length,
    which is 1. Metrics that need a missing counter, and estimates that cannot be made, are left
    out.

    Args:
        engine_steps, requests: The tables of this training step, one table per replica.
        tail_threshold: Largest number of scheduled requests in a step of the long tail.
        counters: For each replica, the names of its counters (without `sam/`) and how much each
            counter increased in this training step.
        split: "train" or "val"; rows of the other split are ignored.
    """
    sums: dict[str, float] = {}
    for of_replica in counters:
        for name, count in of_replica.items():
            sums[name] = sums.get(name, 0.0) + count
    rollout = Rollout(
        of_split(pa.concat_tables([ENGINE_STEPS.empty_table(), *engine_steps]), split),
        of_split(pa.concat_tables([REQUESTS.empty_table(), *requests]), split),
        tail_threshold,
        sums,
    )
    values = sums.copy()
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
    """The engines' records of one training step, for the functions that compute metrics.

    Every numeric column of `StepRecord` is an attribute, a numpy array [steps]. Engine steps are
    sorted by replica and then by time. A null value becomes 0.

    Attributes:
        requests: The table of requests.
        counters: Increase of each counter in this training step, summed over replicas.
        has_drafter: bool [steps], whether the engine has a drafter.
        gate_open: bool [steps], whether the gate was open; False without a drafter.
        slowest: bool [steps], whether the step ran on the busiest replica. If several replicas were
            equally busy, the first of them is taken.
        tail: bool [steps], whether the engine step is in the long tail.
        bulk: bool [steps], the complement of `tail`.
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
                setattr(self, field.name, pc.fill_null(self._steps[field.name], zero).to_numpy())
        gate_open = self._steps["gate_open"]
        self.has_drafter = pc.is_valid(gate_open).to_numpy()
        self.gate_open = pc.fill_null(gate_open, False).to_numpy()
        replicas, index = np.unique(self.replica, return_inverse=True)
        busy_s = np.bincount(index, weights=self.duration_s)  # [replicas]
        self.slowest = self.replica == (replicas[busy_s.argmax()] if len(replicas) else -1)
        self.tail = tail_mask(self.scheduled, self.waiting, self.prompt_tokens, tail_threshold)
        self.bulk = ~self.tail

    def __getattr__(self, name: str) -> np.ndarray:
        raise AttributeError(f"engine steps have no numeric column {name!r}")

    def sums(self, name: str) -> np.ndarray:
        """Sum a column's lists over all steps, index by index; float [length of longest list]."""
        lists = self._steps[name]
        lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        return np.bincount(position, weights=pc.list_flatten(lists).to_numpy())

    def by_source(self, kind: str) -> dict[str, float]:
        """Return the number of draft tokens by source; `kind` is "drafted" or "accepted"."""
        sums = self.sums(f"{kind}_per_source")
        return dict.fromkeys(NAMES, 0.0) | dict(zip(NAMES, sums, strict=False))

    def counted_ratio(self, above: str, below: str, factor: float = 1.0) -> float | None:
        """Return the quotient of two counters, multiplied by `factor`; None if they are missing."""
        if above not in self.counters:
            return None
        return factor * ratio(self.counters[above], self.counters[below])

    @cached_property
    def seconds_without_drafts(self) -> float | None:
        """The largest busy time of a replica, estimated for a rollout without drafts."""
        return seconds_without_drafts(self)
