"""The threshold gate."""

import pytest

from sam_rollout.config import GateConfig
from sam_rollout.gating import ThresholdGate, make_gate


@pytest.mark.parametrize(
    ("num_running", "expected"), [(0, False), (1, True), (8, True), (9, False), (128, False)]
)
def test_open_while_some_but_few_requests_run(num_running, expected):
    assert ThresholdGate(8).open(num_running) is expected


def test_threshold_zero_never_opens():
    assert not any(ThresholdGate(0).open(n) for n in range(5))


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="got -1"):
        ThresholdGate(-1)


def test_a_closed_gate_never_opens():
    gate = make_gate(GateConfig(kind="closed", threshold=8))
    assert not any(gate.open(n) for n in range(10))


def test_make_gate_takes_the_threshold_from_the_config():
    assert make_gate(GateConfig(threshold=5)) == ThresholdGate(5)
