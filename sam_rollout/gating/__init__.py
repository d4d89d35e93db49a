"""Whether to draft at this step."""

from sam_rollout.gating.gate import Gate, ThresholdGate, make_gate

__all__ = ["Gate", "ThresholdGate", "make_gate"]
