"""Engines of vllm-ascend that answer the same prompts with and without drafts.

As a program of its own (``python -m tests.ascend.generate [ENGINE...]``) it prints JSON: it bends
vLLM's process to the CPU. What is ours gets into the engines as it does on an NPU: by the plugin or
by a patch of vllm-ascend's source, and by the worker extension.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

# Before torch and vLLM are imported: all in this process, where the stand-in is.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from npu_stand_in import engine as stand_in

stand_in.prepare()

from sam_rollout.config import (  # noqa: E402
    ARTICLE,
    GateConfig,
    RolloutSamplerConfig,
    SamConfig,
)
from sam_rollout.integrations.vllm.offline import EXTENSION, ON_ASCEND, offline_engine  # noqa: E402
from tests.ascend.conftest import MODEL  # noqa: E402
from tests.integration.responses import generate, texts  # noqa: E402

DRAFT_TOKENS = 3
THRESHOLD = 2
PROMPTS = [[5, 6, 7, 8, 9] * 4, [1, 2, 3] * 5, [4] * 10, [9, 8, 7, 1]]
# While all four run, the gate is closed.
LENGTHS = [12, 90, 20, 60]
RANDOM = {"temperature": 0.8, "top_p": 0.95, "logprobs": 0}
PLAIN = {"temperature": 1.0, "logprobs": 0}  # as in training
GREEDY = {"temperature": 0.0}
# For statistics: tokens after a text that repeats itself, so that drafts are kept and rejected.
COPIES, COPIED_TOKENS = 256, 4

OFF = SamConfig(enabled=False)


def drafting(threshold: int, pad_drafts: str = "auto", scheduling: str = "sync") -> SamConfig:
    """Scheduled synchronously, or an engine's steps would not be those that the gate saw last."""
    return replace(
        ARTICLE,
        max_draft_tokens=DRAFT_TOKENS,
        gate=GateConfig("threshold", threshold),
        pad_drafts=pad_drafts,
        scheduling=scheduling,
    )


ALWAYS = drafting(1_000, scheduling="auto")
# Name -> what drafts, what samples.
ENGINES = {
    "off": (OFF, "coupled"),
    "on": (ALWAYS, "coupled"),
    "gated": (drafting(THRESHOLD), "coupled"),
    "gated, filled up": (drafting(THRESHOLD, "always"), "coupled"),
    "off, stock": (OFF, "stock"),
    "on, stock": (drafting(1_000, "always", "auto"), "stock"),
}


@contextmanager
def started(sam: SamConfig, kind: str, **further):
    arguments = {
        "worker_extension": ON_ASCEND[EXTENSION],
        "record": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 64,
        "logprobs_mode": "processed_logprobs",
        "seed": 1,
        "disable_log_stats": True,
        **further,
    }
    # Eight times in an engine's life, a third of a second each among all modules.
    with (
        mock.patch.object(gc, "collect", lambda *_: 0),
        offline_engine(MODEL, sam, RolloutSamplerConfig(kind), **arguments) as llm,
    ):
        yield llm
    gc.collect()


def watched(runner) -> list[list[int]]:
    """Note the number of drafts of every request, step by step."""
    sample, steps = runner._sample, []

    def note(logits, metadata):
        rows = runner.input_batch.num_reqs
        steps.append([0] * rows if metadata is None else list(metadata.num_draft_tokens))
        return sample(logits, metadata)

    runner._sample = note
    return steps


def answer(llm, prompts: list[list[int]], lengths, sampling: dict, siblings: int = 1) -> list:
    options = {"max_tokens": lengths, "ignore_eos": True, "detokenize": False}
    return generate(llm, prompts, siblings, **options, **sampling)


def try_out(sam: SamConfig, kind: str) -> dict:
    """Answer the prompts in an engine; texts, steps and what was recorded of them."""
    with started(sam, kind) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        report = llm.collective_rpc("sam_bind")[0] | {"runner": type(runner).__qualname__}
        steps, results = watched(runner), {"report": report}
        for name, sampling in {"random": RANDOM, "plain": PLAIN, "greedy": GREEDY}.items():
            outputs = answer(llm, PROMPTS, LENGTHS, sampling)
            results[name] = {
                "texts": texts(outputs),
                "logprobs": [
                    [next(iter(at.values())).logprob for at in output.logprobs or []]
                    for output in outputs
                ],
                "steps": [list(step) for step in steps],
                "records": llm.collective_rpc("sam_drain")[0],
            }
            steps.clear()
        if kind == "stock":
            text = PROMPTS[1] + results["greedy"]["texts"][1][:60]
            outputs = answer(llm, [text], COPIED_TOKENS, {"temperature": 1.0, "top_k": 8}, COPIES)
            results["copies"] = texts(outputs)
            results["copies_of_drafts"] = llm.collective_rpc("sam_drain")[0]
        return results


def run(*names: str) -> dict:
    """What the engines with these names say, all of them by default."""
    return {
        "engines": {name: try_out(*ENGINES[name]) for name in names or ENGINES},
        "lengths": LENGTHS,
        "threshold": THRESHOLD,
        "draft_tokens": DRAFT_TOKENS,
    }


if __name__ == "__main__":
    json.dump(run(*sys.argv[1:]), sys.stdout)
