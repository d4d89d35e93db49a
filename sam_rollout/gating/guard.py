"""Makes the configured gate, and lets a rollout go on if the gate fails."""

import contextlib
import logging

from sam_rollout.config import GateConfig
from sam_rollout.core.limits import Limits
from sam_rollout.gating.agreement import AgreedGate, Exchange
from sam_rollout.gating.auto import AutoGate
from sam_rollout.gating.gate import Gate, ScheduleGate
from sam_rollout.gating.step import EngineStep

logger = logging.getLogger(__name__)


class GuardedGate:
    """Wraps a gate. If the gate fails, a closed gate replaces it, and the rollout goes on."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._reports = True  # whether the gate's `drain` has not failed yet
        self._failures = 0  # since the last drain
        self._last_report: dict[str, float] = {}  # the counts of a gate that has failed

    @property
    def least_chance(self) -> float:
        """The minimum chance of a draft token, decided together with the last budget."""
        return self._gate.least_chance

    @property
    def shape(self) -> int:
        """The index of the draft shape, decided together with the last budget."""
        return self._gate.shape

    def next_budget(self, step: EngineStep, *, whole: bool = False, room: bool = True) -> int:
        """Let the gate learn from a step; return the next step's budget, as `Gate.budget` does."""
        try:
            self._gate.observe(step)
            return self._gate.budget(len(step.verified.sampled), whole=whole, room=room)
        except Exception:
            self._failures += 1
            with contextlib.suppress(Exception):
                self._last_report = self._gate.drain()
            self._gate = ScheduleGate({}, 0)
            logger.warning(
                "The gate failed and is closed; the rollout continues without drafts.",
                exc_info=True,
            )
            return 0

    def drain(self) -> dict[str, float]:
        """Return the gate's counts since the last call, and the number of failures."""
        report, self._last_report = self._last_report, {}
        if self._reports:
            try:
                report |= self._gate.drain()
            except Exception:
                # The gate goes on deciding without reports.
                self._failures += 1
                self._reports = False
                logger.warning("The gate's counters failed and are left out.", exc_info=True)
        failures, self._failures = self._failures, 0
        return report | {"gate/failures": failures}


def make_gate(
    config: GateConfig, limits: Limits, exchange: Exchange | None = None, shapes: int = 1
) -> GuardedGate:
    """Make the gate of a validated configuration.

    `exchange` carries reports between engines that decide together; None for a single engine.
    `shapes` is the number of draft shapes from which the gate `auto` may choose.
    """
    fixed = ScheduleGate(config.budgets(limits.k), limits.k)
    gate: Gate = fixed
    if config.kind == "auto":
        gate = AutoGate(limits, config.exploration, shapes)
    if exchange is not None and config.kind != "closed":
        gate = AgreedGate(gate, fixed, exchange)
    return GuardedGate(gate)
