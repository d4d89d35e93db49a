"""Decides whether requests draft in an engine step, and how many tokens at most."""

from sam_rollout.gating.agreement import Exchange
from sam_rollout.gating.choice import make_gate
from sam_rollout.gating.gate import Gate, ScheduleGate, hands_over
from sam_rollout.gating.step import EngineStep

__all__ = [
    "EngineStep",
    "Exchange",
    "Gate",
    "ScheduleGate",
    "hands_over",
    "make_gate",
]
