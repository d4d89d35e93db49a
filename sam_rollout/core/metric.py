"""What the declaration of a metric holds; `telemetry.schema` collects all of them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# How values of many engine steps and replicas become one number per training step.
SUM = "sum over replicas"
SLOWEST = "of the replica that was busy longest"
MEAN = "ratio of sums over replicas"
STEP = "one value per training step"
SO_FAR = "over the training steps up to this one, those before a resume included"


@dataclass(frozen=True)
class Metric:
    """One metric: its name, unit, meaning and how it is aggregated.

    `name` is full (`sam/tail/time_s`, train split) in `telemetry.schema.METRICS`; a draft source
    declares its own without the part that all of them share (`run_restarts`). A name with a
    placeholder (`accepted_position_<k>`) declares a family.

    `compute` makes it of a `telemetry.aggregate.Rollout`: a number, or numbers by what stands for
    the placeholder; None leaves it out. A metric without it is counted elsewhere.
    """

    name: str
    unit: str
    meaning: str
    aggregation: str = SUM
    compute: Callable[[Any], Any] | None = field(default=None, compare=False)

    @property
    def group(self) -> str:
        """The second part of a full name that begins with `sam`, else the first."""
        first, second = self.name.split("/")[:2]
        return second if first == "sam" else first
