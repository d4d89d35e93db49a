"""Tests reports that are added to the tensor which vLLM sums over ranks.

Tests with real engines are in tests/integration/test_data_parallel.py.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sam_rollout.config import GateConfig
from sam_rollout.core.limits import Limits
from sam_rollout.gating import make_gate
from sam_rollout.gating.agreement import Report
from sam_rollout.integrations.vllm.scheduling import dp_exchange
from sam_rollout.integrations.vllm.scheduling.dp_exchange import DpExchange, join_group
from tests.unit.gating.steps import decode

RANKS, FIELDS, K = 3, 4, 8
REPORT = Report(5, 7, 2, 900, 1, proposal=3, price=1200, trial=0)


class Alone:
    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.sent.append(tensor.clone())


def of_a_step(rank: int, tokens: int = 1) -> torch.Tensor:
    tensor = torch.zeros(FIELDS, RANKS, dtype=torch.int32)
    tensor[:, rank] = torch.arange(FIELDS) + tokens
    return tensor


def test_numbers_that_do_not_fit_are_cut():
    module = SimpleNamespace(dist=Alone())
    module.dist = exchange = DpExchange(0, RANKS, module.dist)
    exchange.publish(REPORT._replace(context=1 << 40))
    module.dist.all_reduce(of_a_step(0), group=None)
    assert exchange.received()[1].max() == (1 << 31) - 1


@pytest.mark.parametrize(
    ("tensor", "options"),
    [
        (torch.zeros(FIELDS, RANKS), {"group": None}),
        (torch.zeros(RANKS, dtype=torch.int32), {"group": None}),
        (torch.zeros(FIELDS, RANKS + 1, dtype=torch.int32), {"group": None}),
        (torch.zeros(FIELDS, RANKS, dtype=torch.int32), {"group": None, "async_op": True}),
        (torch.zeros(FIELDS, RANKS, dtype=torch.int32), {"group": None, "op": "max"}),
    ],
    ids=["floats", "one field", "other ranks", "asynchronous", "no sum"],
)
def test_other_tensors_pass_unchanged(tensor, options):
    module = SimpleNamespace(dist=Alone())
    module.dist = exchange = DpExchange(0, RANKS, module.dist)
    module.dist.all_reduce(tensor, **options)
    assert module.dist.sent[0].shape == tensor.shape
    assert exchange.received()[0] == 0


def test_the_runner_in_use_is_the_one_to_travel_with(monkeypatch):
    ascend, plain = dp_exchange.SYNC_MODULES
    loaded = {name: SimpleNamespace(dist=Alone()) for name in (ascend, plain)}
    parallel = SimpleNamespace(data_parallel_rank=1, data_parallel_size=RANKS)
    for name in loaded:
        monkeypatch.setitem(sys.modules, name, loaded[name])
    for name in (ascend, plain):
        exchange = join_group(parallel)
        loaded[name].dist.all_reduce(of_a_step(1), group=None)
        assert exchange.received()[0] == 1
        monkeypatch.delitem(sys.modules, name)


def test_a_release_that_sums_up_elsewhere_leaves_the_gate_to_decide_alone(monkeypatch, caplog):
    for name in dp_exchange.SYNC_MODULES:
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    exchange = join_group(SimpleNamespace(data_parallel_rank=0, data_parallel_size=RANKS))
    gate = make_gate(GateConfig("threshold", 2), Limits(8, 64, k=K), exchange)
    assert [gate.next_budget(decode(rows)) for rows in (2, 3)] == [K, 0]
    assert gate.drain()["gate/lone_steps"] == 2
    assert "exchanged nothing" in caplog.text
