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

pytestmark = pytest.mark.usefixtures("few_collections")

HEAD = Path(f"{MODEL}_eagle3")
STEPS = 3


def engine(**arguments):
    from sam_rollout.integrations.vllm.offline import offline_engine

    return offline_engine(
        MODEL, SamConfig(enabled=False), dtype="float32", max_model_len=1280, max_num_seqs=32,
        num_gpu_blocks_override=330, seed=5, disable_log_stats=False, **arguments,
    )  # fmt: skip


def generate(engine, prompts, temperature):
    """Token ids of responses."""
    from vllm import SamplingParams, TokensPrompt

    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
        SamplingParams(temperature=temperature, max_tokens=256),
        use_tqdm=False,
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def counted(engine):
    """vLLM's counters since the engine's start: drafts, then accepted tokens by place."""
    found = {
        metric.name.removeprefix("vllm:spec_decode_"): metric for metric in engine.get_metrics()
    }
    accepted = found["num_accepted_tokens_per_pos"].values
    return np.array([found["num_drafts"].value, *accepted])


@pytest.fixture(scope="module")
def drafted(prompts):
    """By temperature, from one engine that drafts with the head: texts and what vLLM counted."""
    head = {"method": "eagle3", "model": str(HEAD), "num_speculative_tokens": STEPS}
    found, before = {}, np.zeros(1 + STEPS)
    with engine(speculative_config=head) as drafting:
        for temperature in (1.0, 0.0):
            texts = generate(drafting, prompts, temperature)
            found[temperature] = texts, counted(drafting) - before
            before = counted(drafting)
    return found


def test_the_engine_accepts_what_a_replay_of_its_texts_accepts(drafted, prompts):
    texts, (drafts, *accepted) = drafted[1.0]
    accepted = np.array(accepted) / drafts
    policy = Policy.load(MODEL, torch.device("cpu"))
    head, shape = load_head(HEAD, policy.model.config.to_dict())
    traces = [
        Trace(str(i), 0, np.array(prompt, np.int32), np.array(text, np.int32))
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    samples = policy.read(traces, shape.target_layers, 2048)
    found = acceptance(Learner(head, policy, STEPS), samples)
    assert accepted[0] > 0.8 and 1 + accepted.sum() > 3
    assert drafts == pytest.approx(found.positions / found.length, rel=0.01)  # verify steps


def test_greedy_texts_are_those_without_drafts(drafted, prompts):
    texts, (drafts, *accepted) = drafted[0.0]
    with engine() as plain:
        assert texts == generate(plain, prompts, 0.0)
    assert sum(accepted) > drafts
