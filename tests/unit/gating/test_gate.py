import pytest

from sam_rollout.config import GateConfig
from sam_rollout.core.limits import Limits
from sam_rollout.gating import Gate, ScheduleGate, make_gate
from tests.unit.gating.group import Seat, Table
from tests.unit.gating.steps import decode

K = 3
LIMITS = Limits(16, 1 << 20, k=K)


def made(**options) -> Gate:
    return make_gate(GateConfig(**options), LIMITS)


@pytest.mark.parametrize(
    ("options", "budgets"),
    [
        ({"kind": "threshold", "threshold": 2}, [0, K, K, 0, 0, 0]),
        ({"kind": "threshold", "threshold": 0}, [0, 0, 0, 0, 0, 0]),
        ({"kind": "closed", "threshold": 8}, [0, 0, 0, 0, 0, 0]),
        ({"kind": "schedule", "schedule": {"4": 1, "2": 3}}, [0, 3, 3, 1, 1, 0]),
    ],
)
def test_fixed_gates_go_by_the_number_of_requests(options, budgets):
    gate = made(**options)
    assert [gate.next_budget(decode(rows)) for rows in range(6)] == budgets


def test_graphs_make_of_a_schedule_all_or_nothing():
    gate = ScheduleGate({4: 8, 8: 0, 16: 3}, 8)
    assert [gate.budget(rows, whole=True) for rows in (4, 8, 16, 17)] == [8, 0, 8, 0]


def test_engines_in_lockstep_decide_together_unless_they_never_draft():
    for kind, together in (("auto", True), ("threshold", True), ("closed", False)):
        gate = make_gate(GateConfig(kind=kind), LIMITS, Seat(Table(2), 0))
        gate.next_budget(decode(2))
        assert ("gate/agreed_steps" in gate.drain()) is together
