"""Reports that travel with the tensor that vLLM's ranks add up, between real processes too."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sam_rollout.config import GateConfig
from sam_rollout.gating import make_gate
from sam_rollout.gating.agreement import IDLE, Report
from sam_rollout.integrations.vllm.scheduling import dp_exchange
from sam_rollout.integrations.vllm.scheduling.dp_exchange import join_group, ride_along
from tests.unit.gating.steps import decode

RANKS, FIELDS, K = 3, 4, 8
REPORT = Report(5, 7, 2, 900, 1, proposal=3, price=1200, trial=0)


class Alone:
    """torch.distributed of a group in which all others send zeros."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        self.sent.append(tensor.clone())

    def barrier(self) -> str:
        return "the original's"


def of_a_step(rank: int, tokens: int = 1) -> torch.Tensor:
    """What a rank gives to the sum, as vLLM does."""
    tensor = torch.zeros(FIELDS, RANKS, dtype=torch.int32)
    tensor[:, rank] = torch.arange(FIELDS) + tokens
    return tensor


def test_a_report_travels_once_and_the_engines_own_rows_stay_as_they_are():
    module = SimpleNamespace(dist=Alone())
    exchange = ride_along(module, rank=1, ranks=RANKS)
    assert exchange.received()[0] == 0
    exchange.publish(REPORT)
    tensor = of_a_step(1)
    module.dist.all_reduce(tensor, group=None)
    assert torch.equal(tensor, of_a_step(1))
    exchanges, reports = exchange.received()
    assert exchanges == 1
    assert [tuple(row) for row in reports.tolist()] == [IDLE, REPORT, IDLE]
    module.dist.all_reduce(of_a_step(1), group=None)
    exchanges, reports = exchange.received()
    assert exchanges == 2
    assert not reports.any()
    assert [len(sent) for sent in module.dist.sent] == [FIELDS + len(Report._fields)] * 2


def test_numbers_that_do_not_fit_are_cut():
    module = SimpleNamespace(dist=Alone())
    exchange = ride_along(module, rank=0, ranks=RANKS)
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
    exchange = ride_along(module, rank=0, ranks=RANKS)
    module.dist.all_reduce(tensor, **options)
    assert module.dist.sent[0].shape == tensor.shape
    assert exchange.received()[0] == 0


def test_an_engine_takes_the_place_of_the_one_before_it_in_its_process():
    original = Alone()
    module = SimpleNamespace(dist=original)
    first = ride_along(module, rank=0, ranks=RANKS)
    second = ride_along(module, rank=0, ranks=RANKS)
    module.dist.all_reduce(of_a_step(0), group=None)
    assert (first.received()[0], second.received()[0]) == (0, 1)
    assert len(original.sent) == 1
    assert module.dist.barrier() == "the original's"


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
    gate = make_gate(GateConfig("threshold", 2), max_rows=8, max_draft_tokens=K, exchange=exchange)
    assert [gate.next_budget(decode(rows)) for rows in (2, 3)] == [K, 0]
    assert gate.drain()["gate/lone_steps"] == 2
    assert "exchanged nothing" in caplog.text


# Requests of each rank, step by step: the first ends and comes back, the last joins late.
LOADS = (
    [20] * 10 + [6] * 10 + [0] * 10 + [3] * 20,
    [2] * 50,
    [0] * 15 + [9] * 10 + [1] * 25,
)
SCHEDULE = {"2": 8, "4": 3, "16": 1}
DIES_AT = 45  # the last rank
LIMIT_S = 30


def _rank(rank: int, store: str, results: Any) -> None:
    """A rank as vLLM runs it: the tensor's sum, the forward pass, the proposer if it has rows."""
    torch.set_num_threads(1)
    dist = torch.distributed
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=LIMIT_S),
    )
    module = SimpleNamespace(dist=dist)
    exchange = ride_along(module, rank, RANKS)
    gate = make_gate(
        GateConfig(kind="schedule", schedule=SCHEDULE, threshold=4),
        max_rows=32,
        max_draft_tokens=K,
        exchange=exchange,
    )
    decided, sums, waited_s = [], [], 0.0
    for step, rows in enumerate(LOADS[rank]):
        if rank == RANKS - 1 and step == DIES_AT:
            os._exit(0)
        tensor = of_a_step(rank, tokens=1 + rows)
        started = time.monotonic()
        try:
            module.dist.all_reduce(tensor, group=dist.group.WORLD)
        except RuntimeError:  # vLLM's engine would end here, with or without us
            waited_s = max(waited_s, time.monotonic() - started)
        else:
            sums.append(tensor[0].tolist())
        # Ranks need different times for a step.
        time.sleep(0.002 * ((step + rank) % RANKS))
        decided.append(gate.next_budget(decode(rows)) if rows else None)
    results.put((rank, decided, sums, waited_s, gate.drain()))
    results.close()
    results.join_thread()
    os._exit(0)  # the group is broken: nothing to take leave of


@pytest.fixture(scope="module")
def processes(tmp_path_factory) -> dict[int, tuple]:
    context = multiprocessing.get_context("spawn")
    store = str(tmp_path_factory.mktemp("gloo") / "store")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, store, results)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        told = [results.get(timeout=4 * LIMIT_S) for _ in range(RANKS - 1)]
    finally:
        for process in ranks:
            process.join(timeout=5)
            process.kill()
    return {rank: rest for rank, *rest in told}


@pytest.mark.timeout(6 * LIMIT_S)
def test_processes_decide_the_same_in_every_step(processes):
    first, second = (processes[rank][0][:DIES_AT] for rank in (0, 1))
    together = [(a, b) for a, b in zip(first, second, strict=True) if a is not None]
    assert all(a == b for a, b in together)
    # Nobody drafts before there are reports; then by the most requests of the last two steps.
    most = [0, *(max(loads) for loads in zip(*LOADS, strict=True))]
    allowed = {20: 0, 9: 1, 6: 1, 3: 3, 2: 8}
    assert second[0] == 0
    assert second[1:] == [allowed[max(most[t - 1 : t + 1])] for t in range(1, DIES_AT)]


def test_processes_still_agree_on_what_vllm_exchanges(processes):
    expected = [[1 + rows for rows in loads] for loads in zip(*LOADS, strict=True)][:DIES_AT]
    for rank in (0, 1):
        assert processes[rank][1] == expected


def test_nobody_waits_for_a_rank_that_died(processes):
    """The sum fails as it would without us, and the gates go on alone without a wait."""
    for rank in (0, 1):
        decided, _, waited_s, counters = processes[rank]
        assert len(decided) == len(LOADS[rank])
        assert waited_s < LIMIT_S
        assert counters["gate/lone_steps"] == len(LOADS[rank]) - DIES_AT
        assert counters["gate/failures"] == 0
    assert processes[0][0][-1] == 3
    assert processes[1][0][-1] == 8
