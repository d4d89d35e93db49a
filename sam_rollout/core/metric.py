"""The declaration of a metric; `telemetry.schema` collects the declarations of all metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# How the values of many engine steps and replicas become one number per training step.
SUM = "sum over replicas"
SLOWEST = "of the replica that was busy longest"
MEAN = "ratio of sums over replicas"
STEP = "one value per training step"
SO_FAR = "over the training steps up to this one, those before a resume included"


@dataclass(frozen=True)
class Metric:
    """One metric's name, unit, meaning and aggregation.

    `telemetry.schema.METRICS` has complete names, such as `sam/tail/time_s`. A draft source
    declares its metrics without the prefix `sam/draft/`. A name with a placeholder
    (`accepted_position_<k>`) declares a family of metrics.

    `compute` takes a `telemetry.aggregate.Rollout`. It returns a number, or a dict that maps the
    placeholder's values to numbers, or None to leave the metric out. A metric without `compute` is
    counted elsewhere.
    """

    name: str
    unit: str
    meaning: str
    aggregation: str = SUM
    compute: Callable[[Any], Any] | None = field(default=None, compare=False)

    @property
    def group(self) -> str:
        """The second part of the complete name if the first part is `sam`, else the first part."""
        first, second = self.name.split("/")[:2]
        return second if first == "sam" else first
