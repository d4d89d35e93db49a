import asyncio
import dataclasses
import inspect
import shutil
from pathlib import Path
from typing import Any

import pytest

from sam_rollout.config import ARTICLE, GateConfig, RolloutSamplerConfig
from sam_rollout.integrations.vllm.engine_settings import WITHOUT_DRAFTS_KEY
from tests.integration.conftest import MODEL
from tests.integration.responses import drafts

ENGINES = 2
REQUESTS = 6
TOKENS = 24
K = 4

pytestmark = pytest.mark.timeout(600)


@dataclasses.dataclass(frozen=True)
class Request:
    engine: int
    tokens: int
    prompt: tuple[int, ...] = (1, 2, 3) * 5
    drafts: bool = True
    temperature: float = 0.0


EQUAL = [Request(number % ENGINES, TOKENS) for number in range(REQUESTS)]
UNEQUAL = [
    *(Request(0, 12 * (1 + number), (number, 7, 8, 9) * 4) for number in range(1, 7)),
    Request(1, 200, (3, 4, 5) * 5),
]
# Largest number of running requests -> draft tokens per request.
SCHEDULE = {"1": 4, "2": 2, "4": 1}
GATES = {
    "schedule": GateConfig(kind="schedule", schedule=SCHEDULE),
    "threshold": GateConfig("threshold", 2),
    "auto": GateConfig(kind="auto"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    folder = tmp_path_factory.mktemp("tiny_qwen3_moe")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(MODEL) / name, folder)
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        initializer_range=0.05,
        max_position_embeddings=512,
        eos_token_id=509,
        pad_token_id=507,
        dtype="float32",
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


async def _generate(engine: Any, name: str, request: Request) -> list[int]:
    from vllm import SamplingParams, TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=list(request.prompt))
    sampling = SamplingParams(
        temperature=request.temperature,
        max_tokens=request.tokens,
        ignore_eos=True,
        extra_args=None if request.drafts else {WITHOUT_DRAFTS_KEY: True},
    )
    outputs = engine.generate(prompt, sampling, request_id=name, data_parallel_rank=request.engine)
    async for output in outputs:
        last = output
    return list(last.outputs[0].token_ids)


async def _generate_all(engine: Any, name: str, requests: list[Request]) -> list[list[int]]:
    return await asyncio.gather(
        *(_generate(engine, f"{name}-{number}", request) for number, request in enumerate(requests))
    )


async def _run(model: str) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from sam_rollout.integrations.vllm.engine_settings import engine_arguments
    from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders, ask_engines
    from tests.integration.group_probe import EXTENSION

    arguments = AsyncEngineArgs(
        model=model,
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        enforce_eager=True,
        disable_log_stats=False,
        enable_prefix_caching=False,
        data_parallel_size=ENGINES,
        enable_expert_parallel=True,
        worker_extension_cls=EXTENSION,
        **engine_arguments(
            dataclasses.replace(ARTICLE, max_draft_tokens=K), RolloutSamplerConfig("coupled")
        ),
    )
    config = arguments.create_engine_config()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
        engine = AsyncLLM.from_vllm_config(config)
    seen: dict[str, Any] = {}
    try:
        seen["bound"] = await ask_engines(engine, "sam_bind")
        recorders = EngineRecorders(ENGINES)
        engine.logger_manager.stat_loggers.append(recorders)
        recorders.work_arrived()
        seen["texts"] = await _generate_all(engine, "request", EQUAL)
        await asyncio.sleep(0.5)  # a step is recorded after its output has come
        seen["drained"] = await ask_engines(engine, "sam_drain")
        seen["first_only"] = await engine.collective_rpc("sam_drain")
        seen["steps"] = [
            recorder.drain(step=1, split="train", replica=0, session_steps=workers[0]["steps"])
            for recorder, workers in zip(recorders.recorders, seen["drained"], strict=True)
        ]
        plain = [dataclasses.replace(request, drafts=False) for request in UNEQUAL]
        together: dict[str, Any] = {"texts": {}}
        together["texts"]["without"] = await _generate_all(engine, "without", plain)
        for kind, gate in GATES.items():
            await engine.collective_rpc("use_gate", args=(gate.to_mapping(),))
            together["texts"][kind] = await _generate_all(engine, kind, UNEQUAL)
            notes = [workers[0] for workers in await ask_engines(engine, "notes")]
            afterwards = [workers[0] for workers in await ask_engines(engine, "sam_drain")]
            together[kind] = {
                "notes": notes,
                "counters": [told["counters"] for told in afterwards],
                "accepted": [drafts(told)[1] for told in afterwards],
            }
        sampled = [dataclasses.replace(request, temperature=1.0) for request in EQUAL]
        together["texts"]["sampled"] = await _generate_all(engine, "sampled", sampled)
    finally:
        engine.shutdown()
    return seen | {"together": together}


@pytest.fixture(scope="module")
def seen(model) -> dict[str, Any]:
    return asyncio.run(_run(model))


def test_every_engine_is_bound(seen):
    assert len(seen["bound"]) == ENGINES
    for workers in seen["bound"]:
        assert [report["proposer"] for report in workers] == [
            "sam_rollout.integrations.vllm.drafting.proposer.SamProposer"
        ]
        assert [report["deciding_engines"] for report in workers] == [ENGINES]


def test_every_engine_tells_its_own_requests(seen):
    for rank, workers in enumerate(seen["drained"]):
        (drafter,) = [part for part in workers if part]
        ids = {request_id.rpartition("-")[0] for request_id in drafter["requests"]}
        assert ids == {f"request-{index}" for index in range(REQUESTS) if index % ENGINES == rank}


def test_every_engine_has_its_own_steps(seen):
    per_engine = REQUESTS // ENGINES
    for steps in seen["steps"]:
        assert sum(steps["generation_tokens"].to_pylist()) == per_engine * TOKENS
        assert max(steps["running"].to_pylist()) <= per_engine
        assert sum(steps["accepted_tokens"].to_pylist()) > 0


def test_vllm_still_answers_for_the_first_engine_only(seen):
    """If this test fails, `ask_engines` can be removed."""
    assert len(seen["first_only"]) == 1


def test_the_text_is_the_same_on_every_engine(seen):
    assert len({tuple(text) for text in seen["texts"]}) == 1


def test_equal_requests_draw_apart_on_every_engine(seen):
    texts = seen["together"]["texts"]["sampled"]
    assert len(set(map(tuple, texts))) == REQUESTS


def test_vllm_still_lacks_experts_of_several_engines_on_a_cpu():
    """If this test fails, `cpu_experts.py` can be removed."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    assert "scatterv" not in inspect.getsource(CpuCommunicator)
    assert inspect.getsource(CPUUnquantizedExperts).count("expert_map") == 1, "named, not used"


@pytest.mark.parametrize("kind", GATES)
def test_engines_agree_on_the_query_length_of_every_step(seen, kind):
    first, second = (notes["budgets"] for notes in seen["together"][kind]["notes"])
    both = sorted(first.keys() & second.keys())
    assert len(both) > 20
    assert [first[step][1] for step in both] == [second[step][1] for step in both]
    assert max(first[step][0] for step in both) == len(UNEQUAL) - 1, "unequal loads"
    alone = second.keys() - first.keys()
    assert len(alone) > 10, "the first engine had only dummy batches then"
    for notes in seen["together"][kind]["notes"]:
        for step, (_, budget) in notes["budgets"].items():
            assert notes["drafts"].get(step, 0) <= budget
    for counters in seen["together"][kind]["counters"]:
        assert counters["gate/lone_steps"] == counters["draft/failures"] == 0
        assert counters["gate/agreed_steps"] > 0


@pytest.mark.parametrize("kind", GATES)
def test_greedy_texts_are_those_without_drafts(seen, kind):
    texts = seen["together"]["texts"]
    assert texts[kind] == texts["without"]
    accepted = seen["together"][kind]["accepted"]
    assert (max(accepted) if kind == "auto" else min(accepted)) > 0
