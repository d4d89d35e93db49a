"""Checks that drafts which are nearly always wrong do not change samples at T = 1.

The distributions of the second to fifth token are compared with those that transformers computes.
"""

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from tests.emulated_device import asynchronous_scheduling
from tests.integration.engines import FORCED_DRAFTS, FORCED_PROPOSER
from tests.integration.responses import session_of
from tests.unit.verification.distributions import assert_drawn_from

RESPONSES = 2000
LEAST = 100  # the next token is tested after prefixes that at least this many responses share


# Each side has a sampler, a limit of running requests, and whether drafts are bound late.
SIDES = {
    "synchronous": ("stock", 256, False),
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
    policy = session_of(engine).drafter._policy

    def draft(_places: Any, budget: np.ndarray, batch: Any, *_: Any) -> int:
        rows = len(budget)
        batch.tokens[:rows] = FORCED_DRAFTS
        drafted, held_back = batch.columns[:2, :rows]
        drafted[:], held_back[:] = np.maximum(budget, 0), 0
        return int(drafted.sum())

    policy.draft, policy.learn = draft, lambda *_: None


@pytest.mark.parametrize("position", [1, 2, 3, 4])
def test_tokens_after_rejected_drafts_follow_the_model(responses, model, position):
    prompt, texts = responses
    by_prefix: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for text in texts:
        by_prefix[tuple(text[:position])].append(text[position])
    tested = 0
    for prefix, observed in by_prefix.items():
        if len(observed) < LEAST:
            continue
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *prefix]])).logits[0, -1].double()
        assert_drawn_from(torch.tensor(observed), logits.softmax(-1))
        tested += 1
    assert tested
