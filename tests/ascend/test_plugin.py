"""Tests our drafter and samplers, which the plugin installs in a real NPUModelRunner."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.config.compilation import CompilationMode
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionCGSupport

from sam_rollout.config import SAMPLERS, GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.drafting.startup_check import StartUpError, check_drafters
from sam_rollout.integrations.vllm.engine_settings import ENGINES_OWN_SAMPLER, engine_arguments
from sam_rollout.integrations.vllm.sampling.samplers import installed_sampler
from sam_rollout.integrations.vllm.worker import SamWorkerExtension
from tests.ascend.conftest import SAM
from tests.ascend.steps import ToyEngine, same_draft_for_all, sampling_metadata
from tests.ascend.test_sampling import IndependentRows, make_sampler

K = SAM.max_draft_tokens
PERIOD = [5, 6, 7, 8]


def ours(sam=SAM, sampler=ENGINES_OWN_SAMPLER):
    return engine_arguments(sam, sampler)["additional_config"]


def worker_of(runner) -> SamWorkerExtension:
    worker = SamWorkerExtension()
    worker.model_runner, worker.vllm_config = runner, runner.vllm_config
    return worker


def test_the_engines_own_ngram_drafter_is_refused_where_ours_is_configured(
    make_runner, vllm_config
):
    speculative = copy.copy(vllm_config.speculative_config)
    speculative.method = "ngram"
    speculative.prompt_lookup_min, speculative.prompt_lookup_max = 1, 4
    runner = make_runner(speculative_config=speculative)
    assert type(runner.drafter).__name__ == "AscendNgramProposer"
    with pytest.raises(StartUpError, match=r"asks for .*SamProposer.*run .*AscendNgramPropos"):
        check_drafters([worker_of(runner).sam_bind()], SAM)


def with_graphs(make_runner, vllm_config, mode, sam):
    """Return a runner whose dispatcher names the graph of each step; no graph is captured."""
    compilation = copy.copy(vllm_config.compilation_config)
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.cudagraph_mode = mode
    compilation.cudagraph_capture_sizes = [1, 2, 4, 8, 16, 32]
    compilation.max_cudagraph_capture_size = 32
    if mode.requires_piecewise_compilation():
        compilation.splitting_ops = None
        compilation.set_splitting_ops_for_v1(all2all_backend="naive")
    runner = make_runner(compilation_config=compilation, additional_config=ours(sam))
    resolved = compilation.resolve_cudagraph_mode_and_sizes(
        AttentionCGSupport.ALWAYS, "AscendAttentionBackend", runner.uniform_decode_query_len
    )
    assert resolved == mode
    runner.cudagraph_dispatcher.initialize_cudagraph_keys(resolved, runner.uniform_decode_query_len)
    return runner


OPEN, CLOSED = GateConfig("threshold"), GateConfig("closed")
EVERY, DRAFTING = "every step of up to 8 requests", "steps that draft of up to 8 requests"
DECODE, BOTH = CUDAGraphMode.FULL_DECODE_ONLY, CUDAGraphMode.FULL_AND_PIECEWISE


@pytest.mark.parametrize(
    ("mode", "gate", "pad_drafts", "described", "graph"),
    [
        (DECODE, CLOSED, "auto", EVERY, "FULL"),
        (DECODE, CLOSED, "never", "no step", "NONE"),
        (DECODE, OPEN, "auto", EVERY, "FULL"),
        (DECODE, OPEN, "never", "no step", "NONE"),
        (BOTH, CLOSED, "auto", DRAFTING, "PIECEWISE"),
        (BOTH, CLOSED, "always", EVERY, "FULL"),
        (BOTH, OPEN, "auto", DRAFTING, "FULL"),
        (BOTH, OPEN, "never", "no step", "PIECEWISE"),
        (CUDAGraphMode.PIECEWISE, OPEN, "auto", "no step", None),
        (CUDAGraphMode.FULL, OPEN, "auto", "no step", None),
        (CUDAGraphMode.NONE, OPEN, "auto", "no step", None),
    ],
)
def test_steps_stay_on_the_captured_graphs(
    make_runner, vllm_config, mode, gate, pad_drafts, described, graph
):
    """Only one of the three texts repeats itself, so only one request has a draft."""
    sam = SamConfig(max_draft_tokens=K, gate=gate, pad_drafts=pad_drafts)
    runner = with_graphs(make_runner, vllm_config, mode, sam)
    engine = ToyEngine(runner, model=None)
    for prompt in (PERIOD * 3, [1, 2, 3], [4, 9]):
        engine.add(prompt, SamplingParams(max_tokens=50))
    assert worker_of(runner).sam_bind()["padding"] == described
    drafts = runner.propose_draft_token_ids([[PERIOD[-1]], [3], [9]], *[None] * 7)
    scheduled = np.array([1 + len(draft) for draft in drafts], np.int32)
    found, *_ = runner._determine_batch_execution_and_padding(
        int(scheduled.sum()), len(scheduled), scheduled, int(scheduled.max()), False
    )
    assert graph in (found.name, None)


def test_upstream_still_ignores_logprobs_mode(make_runner, vllm_config, monkeypatch):
    """If this test fails, ``heed_logprobs_mode`` can be removed."""
    monkeypatch.setattr(vllm_config.model_config, "logprobs_mode", "processed_logprobs")
    runner = make_runner(speculative_config=None, additional_config={})
    assert runner.sampler.logprobs_mode == "raw_logprobs"


@pytest.mark.parametrize("kind", SAMPLERS)
def test_logprobs_are_those_asked_for(make_runner, vllm_config, monkeypatch, kind):
    """Steps with drafts and steps without drafts follow ``logprobs_mode``."""
    monkeypatch.setattr(vllm_config.model_config, "logprobs_mode", "processed_logprobs")
    runner = make_runner(additional_config=ours(sampler=RolloutSamplerConfig(kind)))
    assert installed_sampler(runner) == kind
    logits = torch.randn(1, 12).repeat(2, 1)
    engine = ToyEngine(runner, lambda text: logits[0])
    for text in ([1, 2], [3, 4]):
        engine.add(text, SamplingParams(temperature=0.5, max_tokens=50, logprobs=0))
    expected = (logits[0] / 0.5).log_softmax(dim=-1)
    for drafts in ([[], []], [[7], [int(logits[0].argmax())]]):
        output = engine.step(drafts)
        logprobs = output.logprobs_tensors
        tokens, values = logprobs.logprob_token_ids[:, 0].long(), logprobs.logprobs[:, 0]
        torch.testing.assert_close(values, expected[tokens])


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind != "stock"])
def test_penalties_go_together_with_drafts(vllm_config, kind):
    """Without Triton, our samplers apply penalties, but vllm-ascend's own sampler fails."""
    logits = torch.zeros(4, 12)
    step = same_draft_for_all([3], 2)
    metadata = dataclasses.replace(
        sampling_metadata(2),
        no_penalties=False,
        prompt_token_ids=torch.full((2, 1), 12),  # only padding
        frequency_penalties=torch.zeros(2),
        presence_penalties=torch.tensor([100.0, 0.0]),
        repetition_penalties=torch.ones(2),
        output_token_ids=[[token for token in range(12) if token != 5], [1]],
        spec_token_ids=[[3], [3]],
    )
    sampler = make_sampler(kind, IndependentRows())
    tokens = sampler(step, None, logits, metadata).sampled_token_ids
    assert tokens[0, 0] == 5, "all other tokens carry a penalty, also the draft"
    stock = make_sampler("stock", None)
    with pytest.raises(RuntimeError):  # if nothing is raised, upstream is fixed
        stock(same_draft_for_all([3, 3], 2), None, torch.zeros(6, 12), metadata)
