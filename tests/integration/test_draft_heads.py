"""vLLM loads the tiny model's draft head as it is, and accepts what its training promised."""

from __future__ import annotations

import json

import pytest

from sam_rollout.config import SamConfig
from sam_rollout.heads.checkpoint import check_belongs, read_head
from tests.integration.conftest import MODEL

HEAD = f"{MODEL}_eagle3"
STEPS = 3
ACCEPTED = "spec_decode_num_accepted_tokens_per_pos"
DRAFTS = "spec_decode_num_drafts"


@pytest.fixture(scope="module")
def responses(prompts):
    """`responses(temperature, with_head)`: token ids of every prompt, and vLLM's counters."""
    from vllm import SamplingParams, TokensPrompt

    from sam_rollout.integrations.vllm.offline import offline_engine

    def sample(temperature, with_head=True):
        speculative = {"method": "eagle3", "model": HEAD, "num_speculative_tokens": STEPS}
        drafting = {"speculative_config": speculative, "disable_log_stats": False}
        with offline_engine(
            MODEL, SamConfig(enabled=False), dtype="float32", max_model_len=1280, max_num_seqs=32,
            num_gpu_blocks_override=330, seed=5, **(drafting if with_head else {}),
        ) as engine:  # fmt: skip
            outputs = engine.generate(
                [TokensPrompt(prompt_token_ids=ids) for ids in prompts],
                SamplingParams(temperature=temperature, max_tokens=256),
                use_tqdm=False,
            )
            counted = {m.name: m for m in engine.get_metrics()} if with_head else {}
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        return texts, {name.removeprefix("vllm:"): metric for name, metric in counted.items()}

    return sample


def test_the_head_belongs_to_the_tiny_model():
    with open(f"{MODEL}/config.json", encoding="utf-8") as file:
        check_belongs(read_head(HEAD), json.load(file))


def test_sampled_texts_accept_as_many_drafts_as_held_out_texts_did(responses):
    _, counted = responses(temperature=1.0)
    drafts, accepted = counted[DRAFTS].value, counted[ACCEPTED].values
    with open(f"{HEAD}/training.json", encoding="utf-8") as file:
        expected = json.load(file)["held_out"][-1]
    assert drafts > 1000
    assert accepted[0] / drafts == pytest.approx(expected["per_position"][0], abs=0.05)
    assert 1 + sum(accepted) / drafts == pytest.approx(expected["length"], rel=0.1)


def test_greedy_texts_are_those_without_drafts(responses):
    texts, counted = responses(temperature=0.0)
    assert texts == responses(temperature=0.0, with_head=False)[0]
    assert sum(counted[ACCEPTED].values) > counted[DRAFTS].value
