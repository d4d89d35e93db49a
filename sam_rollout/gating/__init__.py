"""Whether to draft at this step."""

from sam_rollout.gating.gate import ClosedGate, Gate, ThresholdGate, make_gate

__all__ = ["ClosedGate", "Gate", "ThresholdGate", "make_gate"]
