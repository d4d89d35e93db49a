from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from tests.emulated_device import asynchronous_scheduling
from tests.integration.conftest import MODEL
from tests.integration.responses import come_and_go, core_of, drafts, generate, texts

COUPLED = RolloutSamplerConfig("coupled")
HEAD = {"model": {"enabled": True, "path": f"{MODEL}_eagle3"}}
SIDES = {
    "plain": SamConfig(enabled=False),
    "late": SamConfig(gate=GateConfig("threshold", 10_000)),
    "head": SamConfig.from_mapping(
        {"gate": {"kind": "threshold", "threshold": 24}, "sources": HEAD}
    ),
}
RANKS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "max_num_seqs": 40,
    "kv_cache_memory_bytes": 1 << 28,
}
SIBLINGS, LONGEST = 2, 60


@pytest.fixture(scope="module")
def prompts(prompts) -> list[list[int]]:
    return prompts[:16]


@pytest.fixture(scope="module")
def engines(make_engine) -> dict[str, Any]:
    found = {}
    with asynchronous_scheduling():  # in this context ranks are forked, which is faster
        for name, sam in SIDES.items():
            ahead = {} if sam.enabled else {"async_scheduling": False}
            found[name] = make_engine(sam, **engine_arguments(sam, COUPLED), **RANKS, **ahead)
    assert type(core_of(found["late"]).scheduler).__name__ == "LateBindingScheduler"
    return found


def rollout(engine: Any, prompts: list[list[int]]) -> list[list[int]]:
    lengths = [LONGEST // 4 + number for number in range(len(prompts) * SIBLINGS)]
    return texts(generate(engine, prompts, SIBLINGS, max_tokens=lengths))


@pytest.fixture(scope="module")
def reference(engines, prompts) -> list[list[int]]:
    return rollout(engines["plain"], prompts)


@pytest.fixture(scope="module")
def one_by_one(engines, prompts) -> dict[str, list[int]]:
    return come_and_go(engines["plain"], prompts, longest=LONGEST)


@pytest.mark.parametrize("name", ["late", "head"])
def test_all_ranks_verify_the_drafts_of_the_first(name, engines, reference, prompts):
    assert rollout(engines[name], prompts) == reference
    first, second = engines[name].collective_rpc("sam_drain")
    assert second is None, "only the first rank drafts"
    counters, steps = first["counters"], len(first["steps"]["gate_open"])
    assert counters["draft/failures"] == 0 and drafts(first)[1] > 0
    if name == "head":
        assert 0 < counters["draft/model_steps"] < steps, "some steps lack the head's drafts"
        assert counters["draft/model_failures"] == 0


@pytest.mark.parametrize("level", [0, 1])
def test_an_engine_that_sleeps_with_a_step_on_its_way_loses_and_doubles_no_token(
    engines, one_by_one, prompts, level
):
    lengths: list[int] = []

    def sleep(core: Any) -> None:
        lengths.append(len(core.engine_core.engine_core.batch_queue))
        core.sleep(level, mode="keep")
        core.wake_up(["scheduling"] if level == 0 else None)

    assert come_and_go(engines["late"], prompts, longest=LONGEST, between=sleep) == one_by_one
    assert sum(lengths) > 0, "no sleep met a step on its way"
