import logging

import numpy as np
import pytest

from sam_rollout.config import GateConfig
from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered
from sam_rollout.gating import Gate, ScheduleGate, make_gate
from sam_rollout.gating.agreement import AgreedGate, Report
from sam_rollout.gating.auto import AutoGate
from sam_rollout.gating.step import DecidedStep, EngineStep, StepLoad
from tests.unit.gating.group import Group, Seat, Table
from tests.unit.gating.steps import decode, engine_step
from tests.unit.gating.synthetic import K, SyntheticEngines, linear, memory_bound, tail

LIMITS = Limits(32, 1 << 20, k=K)
SCHEDULE = {2: 8, 4: 3, 16: 1}
CLOSED = ScheduleGate({}, K)


def of(**options):
    def make(seat: Seat) -> Gate:
        return make_gate(GateConfig(**options), LIMITS, seat)

    return make


def schedule() -> dict:
    return {"kind": "schedule", "schedule": {str(rows): k for rows, k in SCHEDULE.items()}}


@pytest.mark.parametrize("kind", [{"kind": "threshold", "threshold": 4}, schedule()])
def test_nobody_drafts_more_than_the_busiest_engine_would(kind):
    group = Group(of(**kind), ranks=3)
    alone = make_gate(GateConfig(**kind), LIMITS)
    for loads in ([20, 1, 3], [3, 1, 3], [1, 3, 2], [1, 2, 1]):
        for _ in range(3):
            decided = group.step(loads)
        assert decided == [alone.next_budget(decode(max(loads)))] * 3


def test_an_engine_without_requests_is_not_asked():
    group = Group(of(**schedule()), ranks=2)
    for _ in range(3):
        group.step([20, 2])
    after = [group.step([0, 2]) for _ in range(4)]
    assert after == [[None, 0], [None, 0], [None, 8], [None, 8]]
    joined = [group.step([16, 2]) for _ in range(3)]
    assert joined == [[8, 8], [1, 1], [1, 1]], "it takes over the budget of the others"


@pytest.mark.parametrize("kind", [{"kind": "threshold", "threshold": 4}, schedule()])
def test_all_engines_decide_the_same_in_every_step(kind):
    group = Group(of(**kind), ranks=4)
    random = np.random.default_rng(0)
    loads = np.array([6, 6, 0, 4])
    seen = set()
    for step in range(2000):
        if step % 5 == 0:
            loads = np.clip(loads + random.integers(-2, 3, 4), 0, 6)
        decided = {budget for budget in group.step(loads.tolist()) if budget is not None}
        assert len(decided) <= 1
        seen |= decided
    assert len(seen) > 1


def test_with_nothing_exchanged_an_engine_decides_alone_and_says_so_once(caplog):
    group = Group(of(kind="auto", threshold=5), ranks=2)
    group.step([20, 2])
    with caplog.at_level(logging.WARNING):
        alone = [group.gates[1].next_budget(decode(rows)) for rows in (5, 6, 5)]
    assert alone == [K, 0, K]
    assert len(caplog.records) == 1
    drained = group.gates[1].drain()
    assert (drained["gate/agreed_steps"], drained["gate/lone_steps"]) == (1, 3)
    decided = group.step([20, 2])
    assert decided[0] == decided[1]
    drained = group.gates[1].drain()
    assert (drained["gate/agreed_steps"], drained["gate/lone_steps"]) == (1, 0)


class OnRecord(ScheduleGate):
    def __init__(self) -> None:
        super().__init__(SCHEDULE, K)
        self.steps: list[EngineStep] = []
        self.asked: list[int] = []

    def observe(self, step: EngineStep) -> None:
        self.steps.append(step)

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        self.asked.append(rows)
        return super().budget(rows, whole=whole)


def test_a_gate_learns_of_each_step_with_the_busiest_engines_load_and_the_budget_it_had():
    table, inner = Table(2), OnRecord()
    gate = AgreedGate(inner, CLOSED, Seat(table, 1))
    drafts, told = np.zeros(2, np.int32), np.zeros((4, len(CHANCES)))
    for number in range(6):
        table.laid_down[0] = Report(
            3, 30 + number, 9, 300, 1, proposal=2, price=100, trial=number % 2
        )
        table.exchange()
        ones = np.ones(2, np.int32)
        gate.observe(engine_step(number, ones, drafts, ones, offered=Offered(2, told)))
        gate.budget(2)
        drafts += 1  # the engine reuses its arrays
        told += 1
    assert [step.now_ns for step in inner.steps] == [0, 1, 2, 3, 4], "each once, one step late"
    assert [step.verified.drafted[0] for step in inner.steps] == [0, 1, 2, 3, 4]
    assert [step.offered.tokens[0, 0] for step in inner.steps] == [0, 1, 2, 3, 4]
    assert inner.asked == [3] * 6
    for number, step in enumerate(inner.steps[1:], start=1):
        load = StepLoad(3, 30 + number + 1, 9, 300, steady=True)
        assert step.group == DecidedStep(load, 2, bool((number - 1) % 2))
    assert gate.drain()["gate/agreed_steps"] == 6


def test_counters_tell_what_was_agreed_not_what_was_proposed():
    table = Table(2)
    gate = AgreedGate(AutoGate(LIMITS, 0.005), CLOSED, Seat(table, 1))
    decided = [(5, 0.25, 0), (K, 2.0, 1), (0, 0.0, 0), (5, 0.75, 1)]
    for budget, price, trial in decided:
        table.laid_down[0] = Report(
            9, 9, 0, 90, 1, proposal=budget, price=round(price * 10_000), trial=trial
        )
        table.exchange()
        gate.observe(decode(2))
        assert (gate.budget(2), gate.least_chance) == (budget, price)
    counters = gate.drain()
    assert (counters["gate/open_steps"], counters["gate/agreed_steps"]) == (2, 4)
    assert (counters["gate/trials"], counters["gate/open_trials"]) == (2, 1)
    assert gate.drain()["gate/open_steps"] == 0


def test_what_happened_between_two_calls_is_not_learned_from():
    table, inner = Table(1), OnRecord()
    gate = AgreedGate(inner, CLOSED, Seat(table, 0))
    for exchanges in (1, 1, 2, 1):
        for _ in range(exchanges):
            table.exchange()
        gate.observe(decode(2))
        gate.budget(2)
    assert [step.group.load.steady for step in inner.steps] == [True, False, True]


def engines(seconds, acceptance, *scales) -> SyntheticEngines:
    lengths = [tail(16, 50 * scale) for scale in scales]
    return SyntheticEngines(seconds, lambda rows, now: acceptance, lengths, drafting=1.0)


GROUPS = {
    "drafts pay": engines(memory_bound, 0.7, 1, 1),
    "drafts pay, unequal loads": engines(memory_bound, 0.7, 0.3, 1, 0.6),
    "drafts pay in the tail only": engines(linear, 0.4, 0.7, 1),
    "drafts are always wrong": engines(linear, 0.0, 0.5, 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPS)
def test_a_measuring_group_is_as_fast_as_the_best_fixed_choice(name):
    group = GROUPS[name]

    def gates(make) -> tuple[Table, list[AgreedGate]]:
        table = Table(len(group.lengths))
        seats = [Seat(table, rank) for rank in range(len(group.lengths))]
        return table, [AgreedGate(make(), CLOSED, seat) for seat in seats]

    fixed = [CLOSED] + [ScheduleGate({t: k}, k) for t in (4, 16) for k in (2, 8)]
    seconds = []
    for gate in fixed:
        table, all_alike = gates(lambda gate=gate: gate)
        seconds.append(group.run(*all_alike, rounds=2, exchange=table.exchange))
    table, measuring = gates(lambda: AutoGate(LIMITS, GateConfig().exploration))
    group.run(*measuring, rounds=1, seed=1, exchange=table.exchange)
    assert group.run(*measuring, rounds=2, exchange=table.exchange) < 1.04 * min(seconds)
    for gate in measuring:
        counters = gate.drain()
        assert counters["gate/lone_steps"] == 0
        assert counters["gate/trial_loss_s"] <= 0.005 * counters["gate/decoding_s"] + 12 * linear(
            16, 16 * (1 + K), 20_000
        )
