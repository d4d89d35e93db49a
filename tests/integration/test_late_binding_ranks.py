"""Drafts where several processes share a model, and where an engine sleeps meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.identity import identify
from sam_rollout.integrations.vllm.settings import engine_arguments
from tests.emulated_device import asynchronous_scheduling
from tests.integration.conftest import MODEL
from tests.integration.responses import generate, texts

COUPLED = RolloutSamplerConfig("coupled")
OFF = SamConfig(enabled=False)
# With k = 8: prepared ahead with up to 28 requests, bound with more.
OPEN = SamConfig(gate=GateConfig("threshold", 10_000))
RANKS = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "max_num_seqs": 40,
    "kv_cache_memory_bytes": 1 << 28,
}
MAX_TOKENS = 60
SIBLINGS = 2
PROMPTS = 18


@pytest.fixture(scope="module")
def engines(make_engine) -> dict[str, Any]:
    """Of two ranks each: without drafts, scheduled synchronously, and with drafts bound late."""
    with asynchronous_scheduling():  # ranks are forked there, which is faster
        plain = make_engine(OFF, **engine_arguments(OFF, COUPLED), **RANKS, async_scheduling=False)
        late = make_engine(OPEN, **engine_arguments(OPEN, COUPLED), **RANKS)
    scheduler = late.llm_engine.engine_core.engine_core.scheduler
    assert type(scheduler).__name__ == "LateBindingScheduler"
    return {"plain": plain, "late": late}


def test_all_ranks_verify_the_drafts_of_the_first(engines, prompts):
    """Otherwise ranks would disagree about lengths, and texts would differ or the engine hang."""
    found = {
        name: texts(generate(engine, prompts[:PROMPTS], SIBLINGS, max_tokens=MAX_TOKENS))
        for name, engine in engines.items()
    }
    assert found["late"] == found["plain"]
    first, second = engines["late"].collective_rpc("sam_drain")
    assert second is None, "only the first drafts"
    assert first["counters"]["draft/failures"] == 0
    assert sum(book[2] for book in first["requests"].values()) > 0


def test_all_ranks_run_the_same_passes_of_a_head(make_engine, engines, prompts):
    """The gate opens as requests end; what the first rank chooses comes with the schedule."""
    head = {"enabled": True, "path": f"{MODEL}_eagle3"}
    joined = SamConfig.from_mapping(
        {"gate": {"kind": "threshold", "threshold": 24}, "sources": {"model": head}}
    )
    with asynchronous_scheduling():
        engine = make_engine(joined, **engine_arguments(joined, COUPLED), **RANKS)
    limits = [10 + 3 * number for number in range(PROMPTS * SIBLINGS)]
    found = [
        texts(generate(one, prompts[:PROMPTS], SIBLINGS, max_tokens=limits))
        for one in (engine, engines["plain"])
    ]
    assert found[0] == found[1]
    first, second = engine.collective_rpc("sam_drain")
    assert second is None
    steps, counters = len(first["steps"]["gate_open"]), first["counters"]
    assert 0 < counters["draft/model_steps"] < steps, "with it and without"
    assert counters["draft/model_failures"] == 0
    assert sum(book[2] for book in first["requests"].values()) > 0


def rollout(
    engine: Any, prompts: list[list[int]], interrupt: Callable[[Any], None], every: int
) -> dict[str, list[int]]:
    """Token ids by name of requests that are sampled with interruptions."""
    from vllm import SamplingParams, TokensPrompt

    core, found, steps = engine.llm_engine, {}, 0
    for number, prompt in enumerate(prompts):
        who = identify(prompt, seed=1, step=1, sibling=0, split="train")
        sampling = SamplingParams(max_tokens=MAX_TOKENS, extra_args=who.to_extra_args())
        core.add_request(str(number), TokensPrompt(prompt_token_ids=prompt), sampling)
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
        if steps % every == every - 1:
            interrupt(core)
    return found


@pytest.mark.parametrize("level", [0, 1])
def test_an_engine_that_sleeps_with_a_step_on_its_way_loses_and_doubles_no_token(
    engines, prompts, level
):
    """Level 0 goes on where it was; level 1 gives up the cache, and computes the texts again."""
    lengths: list[int] = []

    def sleep(core: Any) -> None:
        lengths.append(len(core.engine_core.engine_core.batch_queue))
        core.sleep(level, mode="keep")
        core.wake_up(["scheduling"] if level == 0 else None)

    expected = rollout(engines["plain"], prompts[:PROMPTS], lambda _core: None, every=1)
    assert rollout(engines["late"], prompts[:PROMPTS], sleep, every=11) == expected
    assert sum(lengths) > 0, "no step was on its way"


def test_requests_that_are_aborted_by_sleep_leave_nothing_to_the_next(engines, prompts):
    engine = engines["late"]
    expected = texts(generate(engines["plain"], prompts[:PROMPTS], max_tokens=MAX_TOKENS))

    def abort_and_sleep(core: Any) -> None:
        core.abort_request([str(number) for number in range(PROMPTS)])
        core.sleep(1)
        core.wake_up()

    assert rollout(engine, prompts[:PROMPTS], abort_and_sleep, every=9) == {}
    assert texts(generate(engine, prompts[:PROMPTS], max_tokens=MAX_TOKENS)) == expected
