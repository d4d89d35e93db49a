"""Finds one budget for all engines that share experts (docs/gating.md).

These engines compute every layer together, so the proposal of the busiest engine applies to all of
them. The engines exchange their reports on a step at the start of the next step, together with
numbers that vLLM exchanges there anyway. So no engine waits for a report.
"""

import logging
from typing import NamedTuple, Protocol

import numpy as np

from sam_rollout.gating.gate import Gate, hands_over
from sam_rollout.gating.step import DecidedStep, EngineStep, LoadMeter, StepLoad

logger = logging.getLogger(__name__)

_UNKNOWN = StepLoad(0, 0, 0, 0, steady=False)


class Report(NamedTuple):
    """What an engine reports to the other engines after a step, as int32 numbers."""

    # The first five fields are those of `StepLoad`. An idle engine reports 0 in every field.
    rows: int
    tokens: int
    draft_tokens: int
    context: int
    steady: int
    proposal: int  # the budget that this engine proposes
    price: int  # the minimum chance of a draft token, times `_UNITS`
    trial: int  # 1 if the proposal is a trial


IDLE = Report(0, 0, 0, 0, 0, 0, 0, 0)
_UNITS = 10_000
_ROWS, _STEADY = map(Report._fields.index, ("rows", "steady"))  # columns in an array of reports


class Exchange(Protocol):
    """Carries one report of each engine to all engines in every common step."""

    def publish(self, report: Report) -> None:
        """Set the report for the next exchange; an engine without a report counts as idle."""

    def received(self) -> tuple[int, np.ndarray]:
        """Return the number of exchanges so far and the last reports, int32 [engines, fields]."""


class AgreedGate(Gate):
    """A gate that applies the proposal of the busiest engine's gate.

    `gate` makes this engine's proposals. It observes each step one step late, with the busiest
    engine's load. If nothing was exchanged, `fallback` decides. The draft shape is always number 0.
    """

    def __init__(self, gate: Gate, fallback: Gate, exchange: Exchange) -> None:
        self._gate = gate
        self._fallback = fallback
        self._exchange = exchange
        self._meter = LoadMeter()
        self._exchanges = 0  # number of exchanges at the last call of `observe`
        self._fresh = False  # whether reports were exchanged since the previous step
        self._leader: Report | None = None
        self._load = _UNKNOWN  # this engine's load in the last step
        # The last step and its decision, kept until the other engines' reports on this step come.
        self._waiting: tuple[EngineStep, tuple[int, bool]] | None = None
        self._decision = 0, False  # the current step's budget, and whether the step is a trial
        self._agreed_steps = self._lone_steps = self._open_steps = 0
        self._trials = self._open_trials = 0
        self._warned = False

    def observe(self, step: EngineStep) -> None:
        """Read the reports of all engines; let the gate learn from the step that they describe."""
        exchanges, reports = self._exchange.received()
        consecutive = exchanges == self._exchanges + 1
        self._fresh = exchanges > self._exchanges
        self._exchanges = exchanges
        # The busiest engine's report; among equally busy engines, the first one's.
        self._leader = None
        busy = reports[reports[:, _ROWS] > 0]
        if self._fresh and len(busy):
            self._leader = Report(*busy[busy[:, _ROWS].argmax()].tolist())
        if self._waiting is not None:
            load = _UNKNOWN
            if consecutive and self._leader is not None:
                load = StepLoad(*self._leader[:4], steady=bool(busy[:, _STEADY].all()))
            before, decision = self._waiting
            self._gate.observe(before._replace(group=DecidedStep(load, *decision)))
        self._load = self._meter.load(step)
        # The next step overwrites the arrays, so copies are kept.
        kept = step._replace(verified=step.verified.copy(), num_tokens=step.num_tokens.copy())
        if step.offered is not None:
            kept = kept._replace(offered=step.offered.copy())
        self._waiting = kept, self._decision

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        """Return the busiest engine's last proposal, and publish this engine's next proposal."""
        leader = self._leader
        most = max(rows, leader.rows) if leader else rows
        proposal = self._gate.budget(most, whole=whole)
        price = round(self._gate.least_chance * _UNITS)
        self._exchange.publish(Report(*self._load, proposal, price, self._gate.is_trial))
        self.least_chance = 0.0
        self._agreed_steps += self._fresh
        if not self._fresh:
            self._decision = self._decide_alone(rows, whole), False
        elif leader is None:  # no engine had requests in the last step
            self._decision = 0, False
        else:
            self._decision = leader.proposal, bool(leader.trial)
            self.least_chance = leader.price / _UNITS
        budget, trial = self._decision
        is_open = hands_over(budget, self.least_chance)
        self._open_steps += is_open
        self._trials += trial
        self._open_trials += trial and is_open
        return budget

    def _decide_alone(self, rows: int, whole: bool) -> int:
        if not self._warned:
            self._warned = True
            logger.warning(
                "The engines that share experts with this one exchanged nothing for a step. Until "
                "they do, this engine decides alone, by its own number of requests, when to draft."
            )
        self._lone_steps += 1
        return self._fallback.budget(rows, whole=whole)

    def drain(self) -> dict[str, float]:
        """Return the gate's counts; decisions are counted as applied, not as proposed."""
        report = self._gate.drain()
        if "gate/trials" in report:
            report |= {"gate/trials": self._trials, "gate/open_trials": self._open_trials}
            report["gate/open_steps"] = self._open_steps
        report |= {"gate/agreed_steps": self._agreed_steps, "gate/lone_steps": self._lone_steps}
        self._agreed_steps = self._lone_steps = self._open_steps = 0
        self._trials = self._open_trials = 0
        return report
