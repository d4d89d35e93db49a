"""Answers the same prompts in vllm-ascend engines with and without drafts; prints JSON.

Run ``python -m tests.ascend.answering [ENGINE...]``. The program changes vLLM for the CPU, so it
needs its own process. Sampled tokens reach the host late, as they do with an accelerator.
"""

import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

# The engine has to run in this process, because only here the stand-in replaces torch_npu.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from npu_stand_in import engine as stand_in

stand_in.prepare()

# ruff: noqa: E402
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from recipes.dapo_qwen3.synthetic_math import draw_problems, prompts_of
from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, sources_of
from sam_rollout.integrations.vllm.offline import offline_engine
from sam_rollout.integrations.vllm_ascend.hooks import AscendLateBinding
from sam_rollout.integrations.vllm_ascend.plugin import PATCHED_FLAG, RUNNER_MODULE
from sam_rollout.sources.model import ModelSourceConfig
from tests.ascend.conftest import MODEL
from tests.integration.responses import (
    come_and_go,
    core_of,
    counted,
    drafts,
    failing,
    generate,
    runner_of,
    spied,
    texts,
)

WAYS = spied(pytest.MonkeyPatch(), AscendLateBinding, "_bind", "_follow", "_fill")
# Until a sampled token arrives, the host reads this wrong token instead. So reading too early
# changes a text.
NOT_YET = 5
K = 3
SIBLINGS, LONGEST = 2, 110
# Three prompts repeat themselves. A gate with threshold 2 opens when two of the four requests have
# ended.
REPEATED = [[5, 6, 7, 8, 9] * 4, [1, 2, 3] * 5, [4] * 10, [9, 8, 7, 1]]
LENGTHS = [12, 90, 20, 60]
SAMPLING = {"cut": {"temperature": 0.8, "top_p": 0.95, "logprobs": 0}, "greedy": {"temperature": 0}}
# For statistics, an engine samples 4 tokens after each of 256 copies of a repetitive text.
COPIES, COPIED_TOKENS = 256, 4
FAILS_AT = 40  # the head's forward pass with this number raises an error


@dataclass(frozen=True)
class Side:
    sam: SamConfig
    sampler: str = "coupled"
    engine: dict[str, Any] = field(default_factory=dict)


def texts_alone(threshold: int, k: int = K, **options: Any) -> SamConfig:
    return SamConfig(max_draft_tokens=k, gate=GateConfig("threshold", threshold), **options)


def head(*names: str, k: int = K, gate: str = "threshold", **model: Any) -> SamConfig:
    drafter = ModelSourceConfig(True, path=f"{MODEL}_eagle3", max_tokens=K, **model)
    sources = replace(sources_of(*names), model=drafter)
    return SamConfig(max_draft_tokens=k, gate=GateConfig(gate, 10_000), sources=sources)


OFF = SamConfig(enabled=False)
CLOSED = SamConfig(gate=GateConfig("closed"))
# With these limits, the engine preempts requests, and computes a prompt in several steps.
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 6}
ENGINES = {
    "off": Side(OFF, engine={"async_scheduling": False}),
    "closed": Side(CLOSED),
    "opens": Side(texts_alone(12)),
    "filled up": Side(texts_alone(12, k=8, pad_drafts="always")),
    "preempted": Side(texts_alone(1_000, k=8), engine=SMALL),
    # In a synchronous engine, a gate's decision holds for the very next step.
    "sync": Side(texts_alone(2, scheduling="sync")),
    "trees": Side(texts_alone(1_000, k=8, scheduling="sync", draft_shape="tree")),
    "off, stock": Side(OFF, "stock"),
    "on, stock": Side(texts_alone(1_000, pad_drafts="always"), "stock"),
    "head and texts": Side(head("own", "prompt", k=8), engine=SMALL),
    "head, closed": Side(head("own", gate="closed")),
    "head, fails": Side(head("own")),
    # This engine comes last, because it changes the model's class, which the other engines use.
    "head, drawn": Side(head()),
}


class Arrival:
    """A copy that arrives when the host waits for it, or asks a second time whether it is there."""

    def __init__(self, sampled: torch.Tensor, on_host: torch.Tensor) -> None:
        self._sampled, self._on_host = sampled, on_host
        self._asked, self._over, self._lock = 0, False, threading.Lock()

    def query(self) -> bool:
        self._asked += 1
        if self._asked > 1:
            self.synchronize()
        return self._over

    def synchronize(self) -> None:
        with self._lock:
            if not self._over:
                self._on_host.numpy()[:] = self._sampled.numpy()
            self._over = True


def let_tokens_arrive_late() -> None:
    """Delay the copies of sampled tokens to the host, because a CPU makes them at once."""
    made = AsyncGPUModelRunnerOutput.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        sampled = self.sampled_token_ids_cpu
        self.sampled_token_ids_cpu = torch.full_like(sampled, NOT_YET)
        self.async_copy_ready_event = Arrival(sampled, self.sampled_token_ids_cpu)

    AsyncGPUModelRunnerOutput.__init__ = init


@contextmanager
def started(side: Side) -> Iterator[Any]:
    arguments = {
        "record": True,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 64,
        "logprobs_mode": "processed_logprobs",
        "seed": 1,
        "disable_log_stats": False,
        **side.engine,
    }
    # vLLM would collect garbage eight times per engine, for a third of a second each time.
    with (
        mock.patch.object(gc, "collect", lambda *_: 0),
        offline_engine(MODEL, side.sam, RolloutSamplerConfig(side.sampler), **arguments) as llm,
    ):
        yield llm
    gc.collect()


def watched(runner: Any) -> list[list[int]]:
    """Return a list, to which each later step appends its requests' numbers of draft tokens."""
    sample, steps = runner._sample, []

    def note(logits: Any, metadata: Any) -> Any:
        rows = runner.input_batch.num_reqs
        steps.append([0] * rows if metadata is None else list(metadata.num_draft_tokens))
        return sample(logits, metadata)

    runner._sample = note
    return steps


def know_nothing(*models: Any) -> None:
    """Make all tokens equally likely for the models, so that only noise decides between them."""
    for model in models:
        type(model).compute_logits = lambda _self, hidden, *_: torch.zeros(len(hidden), 512)


def task() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return prompts_of(draw_problems(seed=7, count=8), tokenizer)


def try_out(name: str) -> dict[str, Any]:
    side, prompts = ENGINES[name], task()
    drawn, with_head = name == "head, drawn", side.sam.drafts_with_model
    with started(side) as llm:
        runner, scheduler = runner_of(llm), core_of(llm).scheduler
        found: dict[str, Any] = llm.collective_rpc("sam_bind")[0] | {
            "runner": type(runner).__qualname__,
            "scheduler": type(scheduler).__name__,
            "patched": hasattr(sys.modules[RUNNER_MODULE], PATCHED_FLAG),
        }
        if with_head:
            drafter, policy = runner.drafter.model, runner.model
            calls = failing(drafter, "forward", at=FAILS_AT if name == "head, fails" else 0)
            found["shared"] = [
                drafter.lm_head is policy.lm_head,
                drafter.model.embed_tokens is policy.model.embed_tokens,
            ]
        if drawn:
            know_nothing(drafter, policy)
        WAYS.clear()
        lengths = np.linspace(LONGEST // 6, LONGEST, len(prompts) * SIBLINGS).astype(int).tolist()
        outputs = generate(llm, prompts, SIBLINGS, max_tokens=lengths, ignore_eos=drawn)
        report = llm.collective_rpc("sam_drain")[0] or {"requests": {}, "counters": {}}
        drafted, accepted = drafts(report)
        found |= {
            "plain": texts(outputs),
            "ways": list(WAYS),
            "drafted": drafted,
            "accepted": accepted,
            "counters": report["counters"],
            "kept": counted(llm, "spec_decode_num_accepted_tokens"),
            "preemptions": counted(llm, "num_preemptions"),
        }
        if with_head:
            found["calls"] = len(calls)
            found["left_behind"] = [
                runner.drafter.num_speculative_tokens != side.sam.max_draft_tokens,
                "compute_logits" in vars(drafter),
            ]
            if name == "head, closed":
                llm.collective_rpc("sam_probe", args=(True,))
                generate(llm, prompts, max_tokens=32, temperature=0.0)
                found["probe"] = llm.collective_rpc("sam_probe", args=(False,))
            return found
        if side.sampler == "coupled":
            found["one by one"] = come_and_go(
                llm, prompts, longest=LONGEST, aborts=side.sam.enabled
            )
        steps = watched(runner)
        for kind, sampling in SAMPLING.items():
            llm.collective_rpc("sam_drain")
            steps.clear()
            outputs = generate(llm, REPEATED, max_tokens=LENGTHS, ignore_eos=True, **sampling)
            found[kind] = {
                "texts": texts(outputs),
                "logprobs": [
                    next(iter(at.values())).logprob
                    for output in outputs
                    for at in output.logprobs or []
                ],
                "steps": [list(step) for step in steps],
                "records": llm.collective_rpc("sam_drain")[0],
            }
        if side.sampler == "stock":
            text = REPEATED[1] + found["greedy"]["texts"][1][:60]
            options = {"max_tokens": COPIED_TOKENS, "ignore_eos": True, "top_k": 8}
            found["copies"] = texts(generate(llm, [text], COPIES, **options))
            report = llm.collective_rpc("sam_drain")[0]
            found["copied"] = report and drafts(report)
        return found


if __name__ == "__main__":
    let_tokens_arrive_late()
    json.dump({name: try_out(name) for name in sys.argv[1:] or ENGINES}, sys.stdout)
