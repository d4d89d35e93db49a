"""Our drafter in an engine with a process of its own, as in a run: log-probabilities are right."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sam_rollout.config import GateConfig, SamConfig
from tests.integration.responses import drafts, generate

REQUESTS = 6
ON = SamConfig(max_draft_tokens=3, gate=GateConfig("threshold", REQUESTS))


@pytest.fixture(scope="module")
def engine(make_engine) -> Any:
    return make_engine(ON, own_process=True)


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}],
    ids=["T=1", "top-p", "top-k", "T=0.6 top-k top-p"],
)
def test_logprobs_of_sampled_tokens_agree_with_hugging_face(engine, model, prompts, sampling):
    import torch
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    batch = prompts[:REQUESTS]
    differences, total = [], 0
    engine.collective_rpc("sam_drain")
    outputs = generate(engine, batch, max_tokens=400, logprobs=0, **sampling)
    drained = engine.collective_rpc("sam_drain")[0]
    longest = max(len(output.token_ids) for output in outputs)
    assert drafts(drained)[1] > 0 and len(drained["steps"]["gate_open"]) < longest
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
