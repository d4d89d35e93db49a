"""From engine steps to the metrics of one training step, as pure functions.

The same functions serve the trainer while it runs and a reader of the run folder afterwards. What
each metric is, and how it follows from a `Rollout`, is declared in `schema.py`.

Two choices keep the figures additive. "Slowest" means one replica, the one with the largest busy
time, for every metric of a training step, so that head and tail add up to the rollout. The head is
every engine step outside the tail, steps that schedule nothing included.
"""

from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sam_rollout.metric import MAX
from sam_rollout.sources import NAMES
from sam_rollout.telemetry.records import ENGINE_STEPS, REQUESTS
from sam_rollout.telemetry.schema import COMPUTED, GATE_RATIOS, declared, metric_name
from sam_rollout.telemetry.tables import numpy_column, of_split, ratio, tail_mask


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
    step added; metrics that nobody counts are omitted. Where nothing happened metrics are 0, but
    for draft/acceptance_length, which is then 1: a step without drafts gives one token.

    Raises KeyError for a counter that is not declared.
    """
    rollout = Rollout(
        of_split(pa.concat_tables([ENGINE_STEPS.empty_table(), *engine_steps]), split),
        of_split(pa.concat_tables([REQUESTS.empty_table(), *requests]), split),
        tail_threshold,
    )
    values = {name: compute(rollout) for name, compute in COMPUTED.items()}
    values |= {
        f"draft/accepted_position_{position}": ratio(count, rollout.draft_requests.sum())
        for position, count in enumerate(sum_lists(rollout.lists("accepted_per_position")), 1)
    }
    values |= _counted(drafter_counters or {})
    return {metric_name(split, name): float(value) for name, value in values.items()}


def head_gain(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a head's training brought in a step, from the step's metrics; empty where unknown.

    Of the tokens accepted of the model's drafts, the first head would have brought as many as its
    acceptance length has beyond the bonus token, over the trained head's.
    """
    names = ("head_training/length", "head_training/first_length", "draft/accepted_model",
             "engine/rollout_s")  # fmt: skip
    values = [metrics.get(metric_name("train", name)) for name in names]
    if None in values:
        return {}
    length, first, accepted, rollout_s = (float(value) for value in values if value is not None)
    gained = accepted * (1 - ratio(first - 1, length - 1)) if length > 1 else 0.0
    name = metric_name("train", "head_training/gained_tokens_per_s")
    return {name: ratio(gained, rollout_s)}


class Rollout:
    """What the engines recorded in one training step, for the functions that compute metrics.

    Every column of `StepRecord` is an attribute, numpy [steps], ordered by replica, then time; 0
    where it is null. Lists are asked for by `lists`.

    Args:
        steps, requests: Tables of all replicas, of one split.
        tail_threshold: Most scheduled requests of a step in the long tail.

    Attributes:
        requests: The table.
        has_drafter, gate_open, closed: bool [steps]; a gate without drafter is neither.
        slowest: bool [steps], of the replica with the largest busy time.
        tail: bool [steps], in the long tail.
    """

    def __init__(self, steps: pa.Table, requests: pa.Table, tail_threshold: int) -> None:
        self._steps = steps.sort_by([("replica", "ascending"), ("time_s", "ascending")])
        self.requests = requests
        for field in ENGINE_STEPS:
            if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
                zero = pa.scalar(0, field.type)
                setattr(self, field.name, numpy_column(pc.fill_null(self._steps[field.name], zero)))
        gate_open = self._steps["gate_open"]
        self.has_drafter = numpy_column(pc.is_valid(gate_open))
        self.gate_open = numpy_column(pc.fill_null(gate_open, False))
        self.closed = self.has_drafter & ~self.gate_open
        self.slowest = _slowest(self.replica, self.duration_s)
        self.tail = tail_mask(self.scheduled, self.waiting, self.prompt_tokens, tail_threshold)

    def __getattr__(self, name: str) -> np.ndarray:
        raise AttributeError(f"engine steps have no numeric column {name!r}")

    def lists(self, name: str) -> pa.ChunkedArray:
        """A column of lists, [steps]."""
        return self._steps[name]

    def by_source(self, kind: str) -> np.ndarray:
        """Draft tokens ("drafted" or "accepted") by source, in the registry's order."""
        sums = np.zeros(len(NAMES))
        found = sum_lists(self.lists(f"{kind}_per_source"))
        sums[: len(found)] = found
        return sums

    @property
    def gate_changes(self) -> int:
        """How often the gate opened or closed between two steps of a replica."""
        is_open, replica = self.gate_open[self.has_drafter], self.replica[self.has_drafter]
        return int(((is_open[1:] != is_open[:-1]) & (replica[1:] == replica[:-1])).sum())

    @property
    def request_s(self) -> np.ndarray:
        """Time from arrival to end, [requests]."""
        return numpy_column(self.requests["end_s"]) - numpy_column(self.requests["start_s"])

    @property
    def requests_of_replica(self) -> np.ndarray:
        """Requests of each replica that had any."""
        by_replica = self.requests.group_by("replica").aggregate([([], "count_all")])
        return numpy_column(by_replica["count_all"])


def sum_lists(lists: pa.ChunkedArray) -> np.ndarray:
    """Sum of list<i32> [steps] by index within the list, float [longest list]; null is empty."""
    lengths = numpy_column(pc.fill_null(pc.list_value_length(lists), 0)).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(lengths.sum()) - np.repeat(starts, lengths)
    return np.bincount(position, weights=numpy_column(pc.list_flatten(lists)))


def _slowest(replica: np.ndarray, duration_s: np.ndarray) -> np.ndarray:
    """Mask of the replica with the largest busy time (the lowest number if several), [steps]."""
    if not len(replica):
        return np.zeros(0, dtype=bool)
    numbers, index = np.unique(replica, return_inverse=True)
    busy_s = np.bincount(index, weights=duration_s)  # [replicas]
    return replica == numbers[busy_s.argmax()]


def _counted(drafter_counters: Mapping[int, Mapping[str, float]]) -> dict[str, float]:
    """Counters of all replicas together, and what the measuring gate's say in proportion."""
    totals: dict[str, float] = {}
    for counters in drafter_counters.values():
        for name, value in counters.items():
            before = totals.get(name, 0.0)
            largest = declared(f"sam/{name}").aggregation == MAX
            totals[name] = max(before, value) if largest else before + value
    ratios = {
        name: factor * ratio(totals[above], totals[below])
        for name, _, above, below, factor in GATE_RATIOS
        if above in totals
    }
    return totals | ratios
