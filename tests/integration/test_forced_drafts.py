"""The whole engine at T = 1 under drafts that are nearly always wrong: samples must not change.

Thousands of short responses to one prompt; the distribution of the second and third token, given
what came before, is compared with Hugging Face's on the same prefix.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chisquare

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.settings import engine_arguments
from tests.emulated_device import asynchronous_scheduling
from tests.integration.conftest import MODEL
from tests.integration.engines import FORCED_DRAFTS, FORCED_PROPOSER

RESPONSES = 3000
MIN_EXPECTED = 5.0  # per cell of the chi-square test
ALPHA = 1e-4


# Sampler, requests at once, and whether drafts are bound late: to a step that is prepared while the
# one before runs, and, where that would be too large, before it is prepared.
SIDES = {
    "synchronous": ("stock", 256, False),
    "prepared ahead, stock": ("stock", 64, True),
    "bound, stock": ("stock", 256, True),
    "prepared ahead, vectorised": ("vectorised", 64, True),
}


@pytest.fixture(scope="module", params=SIDES)
def responses(request, make_engine, prompts) -> tuple[list[int], list[list[int]]]:
    from vllm import SamplingParams, TokensPrompt

    kind, rows, asynchronous = SIDES[request.param]
    prompt, k = prompts[1], len(FORCED_DRAFTS)
    config = SamConfig(max_draft_tokens=k, gate=GateConfig("threshold", 10_000))
    arguments = {**engine_arguments(config, RolloutSamplerConfig(kind)), "max_num_seqs": rows}
    # Only the first of them computes most of its 36 tokens: nothing is drafted there, and it would
    # take most of the time.
    arguments |= {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": 1320}
    if asynchronous:
        with asynchronous_scheduling():
            engine = make_engine(config, **arguments)
        _force_drafts(engine)
    else:
        forced = {
            "method": "custom_class", "model": FORCED_PROPOSER, "num_speculative_tokens": k,
        }  # fmt: skip
        arguments["speculative_config"] = forced
        engine = make_engine(config, **arguments)
    outputs = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt)] * RESPONSES,
        SamplingParams(max_tokens=5, temperature=1.0, ignore_eos=True),
        use_tqdm=False,
    )
    if asynchronous:
        drained = engine.collective_rpc("sam_drain")[0]
        drafted = sum(totals[1] for totals in drained["requests"].values())
        assert drafted > RESPONSES and drained["counters"]["draft/failures"] == 0
    return prompt, [list(output.outputs[0].token_ids) for output in outputs]


def _force_drafts(engine: Any) -> None:
    """Let a session draft what is nearly always wrong."""
    worker = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    policy = worker.model_runner.drafter.session.drafter._policy

    def draft(
        _places: Any, budget: np.ndarray, tokens: Any, counts: Any, held_back: Any, *_: Any
    ) -> int:
        rows = len(budget)
        tokens[:rows], held_back[:rows] = FORCED_DRAFTS, 0
        counts[:rows] = np.maximum(budget, 0)
        return int(counts[:rows].sum())

    policy.draft, policy.learn = draft, lambda *_: None


def _pvalue(observed: Counter, probabilities: np.ndarray, draws: int) -> float:
    """Of the common tokens by chi-square, of all others together by the binomial distribution.

    One draw where 0.02 are expected is nothing unusual, but chi-square takes it for impossible: the
    others are a cell of it only where there are enough of them.
    """
    common = np.flatnonzero(probabilities * draws >= MIN_EXPECTED)
    counts = np.array([observed[token] for token in common])
    expected = probabilities[common] * draws
    # Rounding of float32 logits may put it a little below zero.
    rare = max(1.0 - probabilities[common].sum(), 0.0)
    seldom = binomtest(int(draws - counts.sum()), draws, rare, alternative="greater").pvalue
    if rare * draws >= MIN_EXPECTED:
        counts, expected = (
            np.append(counts, draws - counts.sum()),
            np.append(expected, rare * draws),
        )
    if len(counts) < 2:
        return seldom
    among = chisquare(counts, expected * counts.sum() / expected.sum()).pvalue
    return min(1.0, 2.0 * min(among, seldom))


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_tokens_after_rejected_drafts_follow_the_model(responses, model, position):
    prompt, texts = responses
    by_prefix: dict[tuple[int, ...], Counter] = defaultdict(Counter)
    for text in texts:
        by_prefix[tuple(text[:position])][text[position]] += 1
    tested = 0
    for prefix, observed in by_prefix.items():
        draws = observed.total()
        if draws < 100:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *prefix]])).logits[0, -1].double()
        assert _pvalue(observed, logits.softmax(-1).numpy(), draws) > ALPHA, prefix
        tested += 1
    assert tested
