"""An engine of vllm-ascend that answers the same prompts with different drafts; prints JSON.

A program of its own (``python -m tests.ascend.generate``): it bends vLLM's process to the CPU.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from npu_stand_in import engine

engine.prepare()

from vllm import LLM, SamplingParams  # noqa: E402

from sam_rollout.config import RolloutSamplerConfig, SamConfig  # noqa: E402
from sam_rollout.identity import identify  # noqa: E402
from sam_rollout.integrations.vllm.proposer import SamProposer  # noqa: E402
from sam_rollout.integrations.vllm.sampling import installed_sampler  # noqa: E402
from sam_rollout.integrations.vllm.settings import ADDITIONAL_CONFIG_KEY  # noqa: E402
from sam_rollout.integrations.vllm_ascend.sampling import install_sampler  # noqa: E402
from tests.ascend.conftest import MODEL  # noqa: E402

DRAFT_TOKENS = 3
PROMPTS = [[5, 6, 7, 8, 9] * 4, [1, 2, 3] * 5, [4] * 10, [9, 8, 7, 1]]
PARAMETERS = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 96, "ignore_eos": True}


def make_engine() -> LLM:
    sam = SamConfig.from_mapping({"enabled": True, "max_draft_tokens": DRAFT_TOKENS})
    return LLM(
        model=MODEL,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=64,
        additional_config={ADDITIONAL_CONFIG_KEY: {"sam": sam.to_mapping()}},
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": DRAFT_TOKENS,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 1,
        },
    )


def drafters(runner):
    """vllm-ascend has no branch for drafters of others: they are put in the method's place."""
    ours = SamProposer(runner.vllm_config)
    ours.bind(runner, drafts_are_used=True, record=False)

    def propose_nothing(sampled, *_args, **_kwargs):
        return [[]] * len(sampled)

    def propose_ours(sampled, *_args, **_kwargs):
        batch = runner.input_batch
        return ours.propose(sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)

    return {
        "none": propose_nothing,
        "ngram": runner.propose_draft_token_ids,
        "suffix automaton": propose_ours,
    }


def main() -> None:
    llm = make_engine()
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    install_sampler(runner, RolloutSamplerConfig(kind="coupled"))
    sample, steps = runner._sample, {"all": 0, "verify": 0}

    def counted(logits, metadata):
        steps["all"] += 1
        steps["verify"] += metadata is not None
        return sample(logits, metadata)

    runner._sample = counted
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    parameters = [
        SamplingParams(
            **PARAMETERS,
            detokenize=False,
            extra_args=identify(p, seed=3, step=0, sibling=0, split="train").to_extra_args(),
        )
        for p in PROMPTS
    ]
    results = {}
    for name, propose in drafters(runner).items():
        runner.propose_draft_token_ids = propose
        steps.update(dict.fromkeys(steps, 0))
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        results[name] = {"texts": texts, "steps": dict(steps)}
    report = {
        "sampler": installed_sampler(runner),
        "runner": f"{type(runner).__module__}.{type(runner).__qualname__}",
        "results": results,
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
