"""One engine of vllm-ascend that answers the same prompts, gate closed and open; prints JSON.

A program of its own (``python -m tests.ascend.generate_patched``): it bends vLLM's process to the
CPU. It is run on a patched vllm-ascend, whose own code then calls what drafts and samples.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from npu_stand_in import engine

engine.prepare()

from vllm import LLM, SamplingParams  # noqa: E402

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig  # noqa: E402
from sam_rollout.gating import make_gate  # noqa: E402
from sam_rollout.identity import identify  # noqa: E402
from sam_rollout.integrations.vllm.sampling import installed_sampler  # noqa: E402
from sam_rollout.integrations.vllm.settings import engine_arguments  # noqa: E402
from sam_rollout.integrations.vllm.startup_check import (  # noqa: E402
    check_drafters,
    check_samplers,
)
from tests.ascend.conftest import MODEL  # noqa: E402

OPEN, CLOSED = GateConfig(threshold=8), GateConfig(kind="closed")
SAM = SamConfig(enabled=True, max_draft_tokens=3, gate=OPEN)
SAMPLER = RolloutSamplerConfig(kind="coupled")
EXTENSION = "sam_rollout.integrations.vllm_ascend.worker.SamAscendWorkerExtension"
PROMPTS = [[5, 6, 7, 8, 9] * 4, [1, 2, 3] * 5, [4] * 10, [9, 8, 7, 1]]
PARAMETERS = {"temperature": 0.8, "top_p": 0.95, "max_tokens": 64, "ignore_eos": True}


def generate(llm) -> dict:
    """Texts, and how many tokens were drafted and accepted for them."""
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    parameters = [
        SamplingParams(
            **PARAMETERS,
            detokenize=False,
            extra_args=identify(p, seed=3, step=0, sibling=0, split="train").to_extra_args(),
        )
        for p in PROMPTS
    ]
    outputs = llm.generate(prompts, parameters, use_tqdm=False)
    (drained,) = llm.collective_rpc("sam_drain")
    _, drafted, accepted, *_ = zip(*drained["requests"].values(), strict=True)
    return {
        "texts": [list(output.outputs[0].token_ids) for output in outputs],
        "drafted": sum(drafted),
        "accepted": sum(accepted),
        "failures": drained["counters"]["draft/failures"],
    }


def main() -> None:
    llm = LLM(
        model=MODEL,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        num_gpu_blocks_override=64,
        worker_extension_cls=EXTENSION,
        **engine_arguments(SAM, SAMPLER),
    )
    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    report = {
        "source": sys.modules[type(runner).__module__].__file__,
        "sampler of the new runner": installed_sampler(runner),
    }
    bound = llm.collective_rpc("sam_bind")
    report["start-up"] = f"{check_drafters(bound, SAM)}\n{check_samplers(bound, SAMPLER)}"
    for name, gate in {"closed": CLOSED, "open": OPEN}.items():
        runner.drafter.session.gate = make_gate(
            gate, max_rows=len(PROMPTS), max_draft_tokens=SAM.max_draft_tokens
        )
        report[name] = generate(llm)
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
