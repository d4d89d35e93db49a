"""Our drafter inside a real vLLM engine: what is generated stays the same, in fewer steps.

The engine that drafts has a process of its own, as in a run.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from sam_rollout.config import GateConfig, SamConfig
from tests.integration.conftest import MODEL
from tests.integration.responses import generate

GATE = 8
ON = SamConfig(enabled=True, max_draft_tokens=3, gate=GateConfig("threshold", GATE))
OFF = SamConfig(enabled=False)
MAX_TOKENS = 400


@pytest.fixture(scope="module")
def with_sam(make_engine) -> Any:
    return make_engine(ON, own_process=True)


@pytest.fixture(scope="module")
def without_sam(make_engine) -> Any:
    return make_engine(OFF)


@pytest.fixture(scope="module")
def greedy(without_sam, prompts) -> list[Any]:
    """The likeliest texts without drafts."""
    return _generate(without_sam, prompts[:GATE], temperature=0.0)


@pytest.fixture(scope="module")
def model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def _generate(engine: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    return generate(engine, prompts, **{"max_tokens": MAX_TOKENS, "logprobs": 0, **sampling})


def _drain(engine: Any) -> dict[str, Any]:
    return engine.collective_rpc("sam_drain")[0]


def _same_until_a_tie(left: Any, right: Any) -> bool:
    """Equal tokens, up to a first difference between two tokens of nearly equal probability."""
    for position, (a, b) in enumerate(zip(left.token_ids, right.token_ids, strict=False)):
        if a != b:
            other = right.logprobs[position][b].logprob
            return abs(left.logprobs[position][a].logprob - other) < 1e-3
    return len(left.token_ids) == len(right.token_ids)


def test_greedy_text_is_the_same_in_fewer_steps(with_sam, greedy, prompts):
    batch = prompts[:GATE]
    _drain(with_sam)
    with_sam.collective_rpc("count_fetches")
    ours = _generate(with_sam, batch, temperature=0.0)
    assert with_sam.collective_rpc("count_fetches") == [0], "drafts come with a step's output"
    drained = _drain(with_sam)
    assert all(map(_same_until_a_tie, ours, greedy))
    longest = max(len(output.token_ids) for output in ours)
    assert len(drained["steps"]["gate_open"]) < 0.8 * longest
    assert all(drained["steps"]["gate_open"])


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}],
    ids=["T=1", "top-p", "top-k", "T=0.6 top-k top-p"],
)
def test_logprobs_of_sampled_tokens_agree_with_hugging_face(with_sam, model, prompts, sampling):
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    batch = prompts[:6]
    differences, total = [], 0
    outputs = _generate(with_sam, batch, **sampling)
    for prompt, output in zip(batch, outputs, strict=True):
        tokens = list(output.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logits = logits.float() / sampling.get("temperature", 1.0)
        k = torch.full((len(tokens),), sampling["top_k"]) if "top_k" in sampling else None
        p = torch.full((len(tokens),), sampling["top_p"]) if "top_p" in sampling else None
        reference = apply_top_k_top_p_pytorch(logits, k, p).log_softmax(-1)
        for position, token in enumerate(tokens):
            ours = output.logprobs[position][token].logprob
            theirs = reference[position, token].item()
            # A token right at the top-p cut may fall on either side of it.
            if math.isfinite(theirs):
                differences.append(abs(ours - theirs))
        total += len(tokens)
    assert len(differences) > 0.99 * total
    differences.sort()
    assert differences[len(differences) // 2] < 1e-4
    assert differences[int(0.99 * len(differences))] < 1e-2


def test_a_broken_drafter_does_not_end_the_rollout(with_sam, greedy, prompts):
    """Last: the engine drafts no more afterwards."""
    _drain(with_sam)
    with_sam.collective_rpc("break_drafter", args=(20,))
    ours = _generate(with_sam, prompts[:4], temperature=0.0)
    assert all(map(_same_until_a_tie, ours, greedy[:4]))
    drained = _drain(with_sam)
    assert drained["counters"]["draft/failures"] == 1
    assert len(drained["steps"]["gate_open"]) == 20
