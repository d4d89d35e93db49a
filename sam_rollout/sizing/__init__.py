"""Estimates the needs of a run: parameters, memory of a device, and responses of a round.

The estimates are computed from sizes, without engine, device or weights. They say whether a setup
can fit, and what takes the memory. They are no measurements.
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
