"""Whether to draft at this step, and how much."""

from sam_rollout.gating.gate import ClosedGate, EngineStep, Gate, ScheduleGate, ThresholdGate
from sam_rollout.gating.guard import GuardedGate, fixed_gate, make_gate

__all__ = [
    "ClosedGate",
    "EngineStep",
    "Gate",
    "GuardedGate",
    "ScheduleGate",
    "ThresholdGate",
    "fixed_gate",
    "make_gate",
]
