"""What a run needs, reckoned on paper: parameters, memory of a device, arithmetic of a batch.

Plain Python on numbers: no engine, no device, no weights. The estimates say whether a setup can fit
and what it spends memory on; they are no measurement.
"""

from sam_rollout.sizing.batch import RolloutRound
from sam_rollout.sizing.drafting import DraftTexts
from sam_rollout.sizing.learning import LearningHead
from sam_rollout.sizing.memory import GIB, host_bytes
from sam_rollout.sizing.parallelism import (
    DrafterSize,
    EngineLimits,
    RolloutLayout,
    TrainingLayout,
)
from sam_rollout.sizing.plan import MemoryPlan, plan_memory
from sam_rollout.sizing.shape import HardwareConfig, ModelShape

__all__ = [
    "GIB",
    "DraftTexts",
    "DrafterSize",
    "EngineLimits",
    "HardwareConfig",
    "LearningHead",
    "MemoryPlan",
    "ModelShape",
    "RolloutLayout",
    "RolloutRound",
    "TrainingLayout",
    "host_bytes",
    "plan_memory",
]
