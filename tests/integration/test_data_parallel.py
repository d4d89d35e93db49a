"""Two engines behind one front end: each bound, recorded and drained on its own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sam_rollout.config import SamConfig
from tests.integration.conftest import MODEL

ENGINES = 2
REQUESTS = 6
TOKENS = 24

pytestmark = pytest.mark.timeout(600)


async def _generate(engine: Any, request: int) -> list[int]:
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=[1, 2, 3] * 5)
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    rank = request % ENGINES
    outputs = engine.generate(
        prompt, sampling, request_id=f"request-{request}", data_parallel_rank=rank
    )
    async for output in outputs:
        last = output
    return list(last.outputs[0].token_ids)


async def _run() -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from sam_rollout.integrations.vllm.engine_group import EngineRecorders, ask_engines
    from sam_rollout.integrations.vllm.settings import engine_arguments
    from tests.integration.engines import EXTENSION

    arguments = AsyncEngineArgs(
        model=MODEL,
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        data_parallel_size=ENGINES,
        worker_extension_cls=EXTENSION,
        **engine_arguments(SamConfig()),
    )
    engine = AsyncLLM.from_engine_args(arguments)
    try:
        bound = await ask_engines(engine, "sam_bind")
        recorders = EngineRecorders(len(bound))
        engine.logger_manager.stat_loggers.append(recorders)
        recorders.work_arrived()
        texts = await asyncio.gather(*(_generate(engine, index) for index in range(REQUESTS)))
        await asyncio.sleep(0.5)  # the last step's record follows its output
        drained = await ask_engines(engine, "sam_drain")
        first_only = await engine.collective_rpc("sam_drain")
    finally:
        engine.shutdown()
    return {
        "bound": bound,
        "recorders": recorders,
        "texts": texts,
        "drained": drained,
        "first_only": first_only,
    }


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    return asyncio.run(_run())


def test_every_engine_is_bound(seen):
    assert len(seen["bound"]) == ENGINES
    for workers in seen["bound"]:
        assert [report["proposer"] for report in workers] == [
            "sam_rollout.integrations.vllm.proposer.SamProposer"
        ]


def test_every_engine_tells_its_own_requests(seen):
    for rank, workers in enumerate(seen["drained"]):
        (drafter,) = [part for part in workers if part]
        ids = {request_id.rpartition("-")[0] for request_id in drafter["requests"]}
        assert ids == {f"request-{index}" for index in range(REQUESTS) if index % ENGINES == rank}


def test_every_engine_has_its_own_steps(seen):
    per_engine = REQUESTS // ENGINES
    for recorder, workers in zip(seen["recorders"].recorders, seen["drained"], strict=True):
        (drafter,) = [part for part in workers if part]
        steps = recorder.drain(
            step=1, split="train", replica=0, drafter_steps=drafter["steps"]
        ).to_table()
        assert sum(steps["generation_tokens"].to_pylist()) == per_engine * TOKENS
        assert max(steps["running"].to_pylist()) <= per_engine
        assert sum(steps["accepted_tokens"].to_pylist()) > 0


def test_finished_requests_are_sorted_by_engine(seen):
    from types import SimpleNamespace

    finished = [SimpleNamespace(request_id=f"request-{index}") for index in range(REQUESTS)]
    shares = seen["recorders"].share_out(finished)
    assert [[request.request_id for request in share] for share in shares] == [
        [f"request-{index}" for index in range(REQUESTS) if index % ENGINES == rank]
        for rank in range(ENGINES)
    ]


def test_vllm_still_answers_for_the_first_engine_only(seen):
    """The reason for asking each engine; once vLLM answers for all, `ask_engines` can go."""
    assert len(seen["first_only"]) == 1


def test_the_text_is_the_same_on_every_engine(seen):
    assert len({tuple(text) for text in seen["texts"]}) == 1
