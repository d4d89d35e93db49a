"""What a run needs, counted on paper: parameters, memory of a device, responses of a round.

Plain Python on numbers: no engine, no device, no weights. The estimates say whether a setup can fit
and what it spends memory on; they are no measurement.
"""

from sam_rollout.sizing.drafting import DraftTexts, RolloutRound
from sam_rollout.sizing.memory import GIB, MemoryPlan, plan_memory
from sam_rollout.sizing.parallelism import (
    DrafterSize,
    EngineLimits,
    RolloutLayout,
    TrainingLayout,
)
from sam_rollout.sizing.shape import HardwareConfig, ModelShape

__all__ = [
    "GIB",
    "DraftTexts",
    "DrafterSize",
    "EngineLimits",
    "HardwareConfig",
    "MemoryPlan",
    "ModelShape",
    "RolloutLayout",
    "RolloutRound",
    "TrainingLayout",
    "plan_memory",
]
