"""Steps that are filled up to k tokens, in vLLM on a CPU; it has no graphs and never needs it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.verl.graphs import capture_sizes, filled_up_requests
from sam_rollout.integrations.verl.run_config import read_run_config
from sam_rollout.integrations.vllm.drafting.proposer import SamProposer
from sam_rollout.integrations.vllm.drafting.startup_check import check_drafters
from sam_rollout.integrations.vllm.serving.step_recorder import EngineStepRecorder
from sam_rollout.integrations.vllm.settings import engine_arguments
from sam_rollout.session.padding import Padding, padding_by_rows
from tests.integration.responses import generate, texts
from tests.unit.test_configs import composed

PROMPTS, MAX_TOKENS, THRESHOLD = 6, 60, 2
OFF = SamConfig(enabled=False)
FILLED_UP = SamConfig(
    max_draft_tokens=3, gate=GateConfig("threshold", THRESHOLD), pad_drafts="always"
)
COUPLED = RolloutSamplerConfig("coupled")


@pytest.fixture(scope="module")
def engines(make_engine) -> dict[SamConfig, Any]:
    return {
        sam: make_engine(sam, **engine_arguments(sam, COUPLED), disable_log_stats=False)
        for sam in (OFF, FILLED_UP)
    }


def texts_of(engine: Any, prompts: list[list[int]], temperature: float) -> list[list[int]]:
    """Responses that end one after the other, so that the gate opens on the way."""
    lengths = [MAX_TOKENS // (1 + number % 3) for number in range(len(prompts))]
    return texts(
        generate(engine, prompts, max_tokens=lengths, temperature=temperature, ignore_eos=True)
    )


def recorded(engine: Any, prompts: list[list[int]], temperature: float) -> tuple[list, Any, dict]:
    """Texts, the recorder of the engine's own statistics, and what the session noted."""
    recorder = EngineStepRecorder()
    loggers = engine.llm_engine.logger_manager.stat_loggers
    engine.collective_rpc("sam_drain")
    loggers.append(recorder)
    written = texts_of(engine, prompts[:PROMPTS], temperature)
    loggers.remove(recorder)
    return written, recorder, engine.collective_rpc("sam_drain")[0]


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_filling_changes_no_text(engines, prompts, temperature):
    off = texts_of(engines[OFF], prompts[:PROMPTS], temperature)
    filled_up, recorder, drained = recorded(engines[FILLED_UP], prompts, temperature)
    assert filled_up == off
    assert set(drained["steps"]["gate_open"]) == {True, False}
    verified = max(record.draft_requests for record in recorder._records)
    assert verified > THRESHOLD, "a closed gate's steps are filled up, too"


def test_the_engines_statistics_less_filling_are_what_the_requests_have(engines, prompts):
    engine = engines[FILLED_UP]
    # The last request of all before it is still in the books.
    before = engine.collective_rpc("sam_drain")[0]["requests"]
    _, recorder, drained = recorded(engine, prompts, 1.0)
    counted = sum(record.draft_tokens for record in recorder._records)
    table = recorder.drain(step=0, split="train", replica=0, session_steps=drained["steps"])
    requests = [totals for name, totals in drained["requests"].items() if name not in before]
    assert len(requests) == PROMPTS
    _, drafted, accepted, *_ = map(sum, zip(*requests, strict=True))
    assert 0 < accepted < drafted < counted
    assert sum(table["draft_tokens"].to_pylist()) == drafted
    assert sum(table["accepted_tokens"].to_pylist()) == accepted
    assert counted == drafted + drained["counters"]["draft/padding_tokens"]


@pytest.mark.parametrize("name", ["article_32b_graph", "reference_script_235b_grpo"])
def test_the_presets_graphs_hold_every_filled_up_step(name):
    """vLLM's own dispatcher agrees with what the launcher reckons before there is an engine."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    config = composed(f"experiment={name}", "sam=matched")
    sam = read_run_config(config).sam
    rollout, k = config.actor_rollout_ref.rollout, sam.max_draft_tokens
    sizes = capture_sizes(config, sam)
    compilation = SimpleNamespace(
        cudagraph_mode=CUDAGraphMode.FULL_DECODE_ONLY,
        cudagraph_capture_sizes=sizes,
        max_cudagraph_capture_size=sizes[-1],
        compile_sizes=[],
    )
    dispatcher = CudagraphDispatcher(
        SimpleNamespace(
            compilation_config=compilation,
            num_speculative_tokens=k,
            lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=rollout.max_num_seqs),
        )
    )
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_DECODE_ONLY, 1 + k)
    proposer = SimpleNamespace(_runner=SimpleNamespace(cudagraph_dispatcher=dispatcher))
    graph_of = partial(SamProposer._graph_of, proposer)
    by_rows = padding_by_rows(
        "auto", graph_of, k, rollout.max_num_seqs, rollout.max_num_batched_tokens
    )
    assert (by_rows[1:] == Padding.EVERY_STEP).all()
    assert filled_up_requests(config, sam) == rollout.max_num_seqs


def test_the_start_up_line_says_so(engines):
    reports = engines[FILLED_UP].collective_rpc("sam_bind")
    line = check_drafters(reports, FILLED_UP)
    assert "; filled up to k: every step of up to 32 requests; scheduled synchronously: " in line
