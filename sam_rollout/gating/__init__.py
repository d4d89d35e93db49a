"""Whether to draft at this step, and how much."""

from sam_rollout.gating.agreement import Exchange
from sam_rollout.gating.gate import ClosedGate, Gate, ScheduleGate, ThresholdGate, hands_over
from sam_rollout.gating.guard import GuardedGate, fixed_gate, make_gate
from sam_rollout.gating.step import EngineStep

__all__ = [
    "ClosedGate",
    "EngineStep",
    "Exchange",
    "Gate",
    "GuardedGate",
    "ScheduleGate",
    "ThresholdGate",
    "fixed_gate",
    "hands_over",
    "make_gate",
]
