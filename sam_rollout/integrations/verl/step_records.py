"""What a run keeps of its training steps, and what it adds to their metrics.

The trainer asks, and nothing here may cost a training run: what fails is left out, with a warning.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import pyarrow as pa
from transfer_queue import KVBatchMeta

from sam_rollout.config import RunConfig
from sam_rollout.identity import TRAIN_SPLIT
from sam_rollout.integrations.verl.replica_records import ReplicaRecords
from sam_rollout.integrations.verl.response_counts import ResponseBook
from sam_rollout.telemetry.aggregate import aggregate
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.records import RunFolder, RunFolderError
from sam_rollout.telemetry.schema import metric_name
from sam_rollout.telemetry.sentinel import Sentinel, TrainingStep

logger = logging.getLogger(__name__)

COLLECT_S, CURVE_S = "telemetry/collect_s", "telemetry/curve_s"


class StepRecords:
    """Files records, and holds each training step beside the baseline and before the sentinel.

    Args:
        run: Our settings.
        folder: The run's; nothing else writes there what steps bring.
        dumped: Whether verl dumps what it trains on.
    """

    def __init__(self, run: RunConfig, folder: RunFolder, *, dumped: bool) -> None:
        self.responses = ResponseBook(dumped=dumped)
        self._folder, self._tail_threshold = folder, run.telemetry.tail_threshold
        path = run.compare.baseline_run
        self._baseline = Baseline(path, _earlier_steps(folder)) if path else None
        sentinel = run.telemetry.sentinel
        self._sentinel = Sentinel(sentinel) if run.sam.enabled and sentinel.enabled else None
        self._reports: list[ReplicaRecords] = []  # of the training step
        self._spent_s = {COLLECT_S: 0.0, CURVE_S: 0.0}

    def collect(
        self, step: int, split: str, drain: Callable[[], Iterable[ReplicaRecords]]
    ) -> dict[str, float]:
        """File what `drain` gets from the replicas; returns the step's aggregates."""
        if split == TRAIN_SPLIT:
            self._reports = []
        with self.timed(COLLECT_S):
            return _attempt(
                lambda: self._file(split, [*drain()]),
                f"Records of the rollout of step {step} are lost; training goes on.",
            )

    def _file(self, split: str, replicas: list[ReplicaRecords]) -> dict[str, float]:
        if split == TRAIN_SPLIT:
            self._reports = replicas
        tables = [records.engine_steps for records in replicas]
        if not any(table.num_rows for table in tables):
            return {}
        for records in replicas:
            self._folder.write_engine_steps(records.replica, records.engine_steps)
            self._folder.write_requests(records.replica, records.requests)
            if records.traces is not None:
                self._folder.write_traces(records.replica, records.traces)
        if split == TRAIN_SPLIT:
            self.responses.note(replicas)
        return aggregate(
            tables,
            [records.requests for records in replicas],
            tail_threshold=self._tail_threshold,
            drafter_counters={records.replica: records.drafter_counters for records in replicas},
            split=split,
        )

    @property
    def engine_steps(self) -> list[pa.Table]:
        """Of the training step, engine by engine."""
        return [records.engine_steps for records in self._reports]

    def complete(
        self,
        step: int,
        metrics: dict[str, Any],
        batch: KVBatchMeta,
        alert: Callable[[str, str], None],
    ) -> None:
        """Add to a training step's metrics.

        Args:
            metrics: verl's and our aggregates.
            batch: What was trained on.
            alert: Is told what the sentinel finds, as title and text.
        """
        with self.timed(COLLECT_S):
            metrics |= _attempt(
                lambda: self.responses.metrics(batch),
                "verl's metrics of speculation are left out.",
            )
            if (baseline := self._baseline) is not None:
                metrics |= _attempt(
                    lambda: baseline.metrics(step, metrics),
                    "This step is not laid beside the baseline's.",
                )
            if (sentinel := self._sentinel) is not None:
                metrics |= _attempt(
                    lambda: self._watch(sentinel, step, metrics, alert),
                    "This step is not looked at by the sentinel.",
                )

    def _watch(
        self, sentinel: Sentinel, step: int, metrics: dict[str, Any], alert: Callable
    ) -> dict[str, float]:
        """Say what is wrong with the step's drafts."""
        findings, values = sentinel.look(TrainingStep(metrics, self._reports))
        for finding in findings:
            text = f"training step {step}: {finding}."
            logger.warning("Sentinel, %s", text)
            alert(f"sam_rollout: {finding.name}", text)
        return values

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add what passes inside to `COLLECT_S` or `CURVE_S`, an exception's time included."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[part] += time.perf_counter() - started_s

    def write(self, step: int, metrics: dict[str, Any], step_s: float | None) -> None:
        """Write a step's metrics into the run folder, with what recording cost.

        Args:
            step_s: How long a training step took; None for a validation outside of training.
        """
        if step_s is not None:
            spent = self._spent_s | {"telemetry/share": sum(self._spent_s.values()) / step_s}
            metrics |= {metric_name(TRAIN_SPLIT, name): value for name, value in spent.items()}
        self._spent_s = dict.fromkeys(self._spent_s, 0.0)
        # Some of verl's entries are tables or text for its own loggers.
        numbers: dict[str, Any] = {k: v for k, v in metrics.items() if isinstance(v, Real)}
        try:
            self._folder.append_train_step(step, numbers)
        except OSError:
            logger.warning("Step %s is not in the run folder.", step, exc_info=True)


def _earlier_steps(folder: RunFolder) -> Mapping[int, dict[str, float]]:
    """A run's metrics so far, if it is resumed."""
    try:
        return folder.read_train_steps(problems=[])
    except RunFolderError:
        return {}  # its first start


def _attempt(measure: Callable[[], dict[str, float]], lost: str) -> dict[str, float]:
    """The metrics of a call; none, and a warning, where it fails: the step's others stay."""
    try:
        return measure()
    except Exception:
        logger.warning(lost, exc_info=True)
        return {}
