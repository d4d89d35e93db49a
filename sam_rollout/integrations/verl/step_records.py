"""Writes the records of training steps, and adds our metrics to verl's.

A failure to write records or to compute metrics only causes a warning in the log.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import pyarrow as pa

from sam_rollout.config import RunConfig
from sam_rollout.core.identity import TRAIN_SPLIT
from sam_rollout.integrations.verl.replica_records import ReplicaRecords
from sam_rollout.telemetry.aggregate import aggregate
from sam_rollout.telemetry.baseline import Baseline
from sam_rollout.telemetry.proof import Compared, proof_line, proof_metrics
from sam_rollout.telemetry.records import RunFolder, RunFolderError
from sam_rollout.telemetry.schema import named
from sam_rollout.telemetry.sentinel import Sentinel, TrainingStep

logger = logging.getLogger(__name__)


class StepRecords:
    """Writes records, compares each training step with the baseline, and runs the sentinel."""

    def __init__(self, run: RunConfig, folder: RunFolder) -> None:
        self._folder, self._tail_threshold = folder, run.telemetry.tail_threshold
        path = run.compare.baseline_run
        self._baseline = Baseline(path, _earlier_steps(folder)) if path else None
        sentinel = run.telemetry.sentinel
        self._sentinel = Sentinel(sentinel) if run.sam.enabled and sentinel.enabled else None
        self._reports: list[ReplicaRecords] = []  # records of the current training step
        # Times in seconds since the epoch. The period of `_reports` began at `_since_s`. Records
        # were last collected at `_drained_s`.
        self._since_s = self._drained_s = -math.inf

    def collect(
        self, step: int, split: str, drain: Callable[[], Iterable[ReplicaRecords]]
    ) -> dict[str, float]:
        """Write the records that `drain` returns; return the step's aggregated metrics."""
        if split == TRAIN_SPLIT:
            self._reports, self._since_s = [], self._drained_s
        metrics = _attempt(
            lambda: self._file(split, [*drain()]),
            f"Records of the rollout of step {step} are lost; training goes on.",
        )
        self._drained_s = time.time()
        return metrics

    def _file(self, split: str, replicas: list[ReplicaRecords]) -> dict[str, float]:
        if split == TRAIN_SPLIT:
            self._reports = replicas
        tables = [records.engine_steps for records in replicas]
        if not any(table.num_rows for table in (*tables, *(one.requests for one in replicas))):
            return {}
        for records in replicas:
            self._folder.write("engine_steps", records.replica, records.engine_steps)
            self._folder.write("requests", records.replica, records.requests)
            if records.traces is not None:
                self._folder.write("traces", records.replica, records.traces)
        return aggregate(
            tables,
            [records.requests for records in replicas],
            tail_threshold=self._tail_threshold,
            counters=[records.drafter_counters for records in replicas],
            split=split,
        )

    def prove(self, step: int, compare: Callable[[], Sequence[Compared]]) -> dict[str, float]:
        """Call `compare` for a training step's texts; print its results, and return metrics."""

        def measured() -> dict[str, float]:
            began_s = time.perf_counter()
            found = compare()
            seconds = time.perf_counter() - began_s
            print(f"Proof, training step {step}: {proof_line(found, seconds)}.", flush=True)
            return named(TRAIN_SPLIT, proof_metrics(found, seconds))

        return _attempt(measured, f"Texts of step {step} are not compared; training goes on.")

    @property
    def engine_steps(self) -> list[pa.Table]:
        return [records.engine_steps for records in self._reports]

    def complete(
        self, step: int, metrics: dict[str, Any], alert: Callable[[str, str], None]
    ) -> None:
        """Add the baseline's and the sentinel's metrics to a training step's metrics, in place.

        `alert` gets a title and a text for each of the sentinel's findings.
        """
        if (baseline := self._baseline) is not None:
            metrics |= _attempt(
                lambda: baseline.metrics(step, metrics),
                "This step was not compared with the baseline.",
            )
        if (sentinel := self._sentinel) is not None:
            metrics |= _attempt(
                lambda: self._watch(sentinel, step, metrics, alert),
                "The sentinel did not check this step.",
            )

    def _watch(
        self, sentinel: Sentinel, step: int, metrics: dict[str, Any], alert: Callable
    ) -> dict[str, float]:
        findings, values = sentinel.look(TrainingStep(metrics, self._reports, self._since_s))
        for finding in findings:
            text = f"training step {step}: {finding}."
            logger.warning("Sentinel, %s", text)
            alert(f"sam_rollout: {finding.name}", text)
        return values

    def write(self, step: int, metrics: dict[str, Any]) -> None:
        numbers: dict[str, Any] = {k: v for k, v in metrics.items() if isinstance(v, Real)}
        try:
            self._folder.append_train_step(step, numbers)
        except OSError:
            logger.warning("Step %s is not in the run folder.", step, exc_info=True)


def _earlier_steps(folder: RunFolder) -> Mapping[int, dict[str, float]]:
    try:
        return folder.read_train_steps(problems=[])
    except RunFolderError:
        return {}  # this is the run's first start


def _attempt(measure: Callable[[], dict[str, float]], lost: str) -> dict[str, float]:
    try:
        return measure()
    except Exception:
        logger.warning(lost, exc_info=True)
        return {}
