"""What recording costs the trainer, step by step."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sam_rollout.telemetry.schema import metric_name

COLLECT_S, CURVE_S = "telemetry/collect_s", "telemetry/curve_s"


class RecordingClock:
    """Adds up the time spent on recording a training step."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget what was added up: it belongs to no training step."""
        self._spent_s = {COLLECT_S: 0.0, CURVE_S: 0.0}

    @contextmanager
    def running(self, part: str) -> Iterator[None]:
        """Add what passes inside to ``COLLECT_S`` or ``CURVE_S``, an exception's time included."""
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self._spent_s[part] += time.perf_counter() - started_s

    def take(self, step_s: float | None) -> dict[str, float]:
        """Return the metrics of a training step that took ``step_s``, and start anew."""
        values = dict(self._spent_s)
        if step_s:
            values["telemetry/share"] = sum(values.values()) / step_s
        self.reset()
        return {metric_name("train", name): value for name, value in values.items()}
