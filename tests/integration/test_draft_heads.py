"""vLLM loads the tiny model's draft head as it is, and drafts with it what its training drafted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sam_rollout.bench.traces import Trace
from sam_rollout.config import SamConfig
from sam_rollout.heads.acceptance import acceptance
from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.training import Learner
from sam_rollout.heads.writing import load_head
from tests.integration.conftest import MODEL

HEAD = Path(f"{MODEL}_eagle3")
STEPS = 3


@pytest.fixture(scope="module")
def sample(prompts):
    """`sample(temperature, **engine arguments)`: token ids of responses, and vLLM's counters."""
    from vllm import SamplingParams, TokensPrompt

    from sam_rollout.integrations.vllm.offline import offline_engine

    def run(temperature, **arguments):
        with offline_engine(
            MODEL, SamConfig(enabled=False), dtype="float32", max_model_len=1280, max_num_seqs=32,
            num_gpu_blocks_override=330, seed=5, disable_log_stats=False, **arguments,
        ) as engine:  # fmt: skip
            outputs = engine.generate(
                [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
                SamplingParams(temperature=temperature, max_tokens=256),
                use_tqdm=False,
            )
            counters = {m.name.removeprefix("vllm:spec_decode_"): m for m in engine.get_metrics()}
        return [list(output.outputs[0].token_ids) for output in outputs], counters

    return run


@pytest.fixture(scope="module")
def drafting():
    """Engine arguments of the head."""
    head = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": STEPS}
    return {"speculative_config": head}


def test_the_engine_accepts_what_a_replay_of_its_texts_accepts(sample, drafting, prompts):
    texts, counters = sample(1.0, **drafting)
    drafts = counters["num_drafts"].value
    accepted = np.array(counters["num_accepted_tokens_per_pos"].values) / drafts
    policy = Policy.load(MODEL, torch.device("cpu"))
    head, shape, *_ = load_head(HEAD, policy.model.config.to_dict())
    traces = [
        Trace(str(i), 0, np.array(prompt, np.int32), np.array(text, np.int32))
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    samples = policy.read(traces, shape.target_layers, 2048)
    found = acceptance(Learner(head, policy, STEPS), samples)
    assert accepted[0] > 0.8 and 1 + accepted.sum() > 3
    assert drafts == pytest.approx(found.positions / found.length, rel=0.01)  # verify steps


def test_greedy_texts_are_those_without_drafts(sample, drafting):
    texts, counters = sample(0.0, **drafting)
    assert texts == sample(0.0)[0]
    assert counters["num_accepted_tokens"].value > counters["num_drafts"].value
