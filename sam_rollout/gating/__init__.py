"""Decides whether requests draft in an engine step, and how many tokens at most."""

from sam_rollout.config import GateConfig
from sam_rollout.core.limits import Limits
from sam_rollout.gating.agreement import AgreedGate, Exchange
from sam_rollout.gating.auto import AutoGate
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


def make_gate(
    config: GateConfig, limits: Limits, exchange: Exchange | None = None, shapes: int = 1
) -> Gate:
    """Make the gate that a validated configuration names.

    `exchange` carries reports between engines that wait for each other; it is None for a single
    engine. `shapes` is the number of draft shapes from which the gate `auto` may choose.
    """
    fixed = ScheduleGate(config.budgets(limits.k), limits.k)
    gate: Gate = fixed
    if config.kind == "auto":
        gate = AutoGate(limits, config.exploration, shapes)
    if exchange is not None and config.kind != "closed":
        gate = AgreedGate(gate, fixed, exchange)
    return gate
