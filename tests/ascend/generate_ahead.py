"""Engines of vllm-ascend that schedule a step ahead, and one that does not.

What a step sampled reaches the host when somebody waits for it, and no earlier.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import numpy as np
import torch

from tests.ascend.generate import started  # before vLLM: it bends the process to the CPU

# isort: split
from transformers import AutoTokenizer
from vllm.v1.worker.gpu_model_runner import AsyncGPUModelRunnerOutput

from recipes.dapo_qwen3.synthetic_math import draw_problems
from sam_rollout.config import GateConfig, SamConfig
from sam_rollout.integrations.vllm_ascend.scheduling.late_binding import AscendLateBinding
from tests.ascend.conftest import MODEL
from tests.integration.responses import come_and_go, generate, texts

WAYS = ("_bind", "_follow", "_fill")
PROMPTS, SIBLINGS = 8, 2
LONGEST = 110
NOT_YET = 5  # a token like any other: who reads it too early samples something else
# Requests are preempted, and no step holds all prompts.
SMALL = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 6}
OFF = SamConfig(enabled=False)
# Name -> what drafts, and further arguments of the engine.
ENGINES: dict[str, tuple[SamConfig, dict[str, Any]]] = {
    "synchronous": (OFF, {"async_scheduling": False}),
    "closed": (SamConfig(gate=GateConfig("closed")), {}),
    "opens": (SamConfig(max_draft_tokens=3, gate=GateConfig("threshold", 12)), {}),
    "auto": (SamConfig(gate=GateConfig("auto", exploration=0.1)), {}),
    "filled up": (SamConfig(gate=GateConfig("threshold", 12), pad_drafts="always"), {}),
    "preempted": (SamConfig(gate=GateConfig("threshold", 1_000)), SMALL),
}


class Arrival:
    """The event of a copy to the host that takes place when somebody waits for it."""

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
    """Without this they are on the host at once: the device is the host."""
    made = AsyncGPUModelRunnerOutput.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        sampled = self.sampled_token_ids_cpu
        self.sampled_token_ids_cpu = torch.full_like(sampled, NOT_YET)
        self.async_copy_ready_event = Arrival(sampled, self.sampled_token_ids_cpu)

    AsyncGPUModelRunnerOutput.__init__ = init


def count_ways(counts: Counter[str]) -> None:
    """Count how often each way of late binding is gone."""
    for name in WAYS:
        method = getattr(AscendLateBinding, name)

        def call(*arguments: Any, _name: str = name, _method: Any = method, **options: Any) -> Any:
            counts[_name] += 1
            return _method(*arguments, **options)

        setattr(AscendLateBinding, name, call)


def task() -> list[list[int]]:
    """Token ids of prompts of the synthetic task: drafts are kept from the whole distribution."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True
        )["input_ids"]
        for problem in draw_problems(seed=7, count=PROMPTS)
    ]


def try_out(sam: SamConfig, arguments: dict[str, Any], ways: Counter[str]) -> dict[str, Any]:
    """Answer the prompts in an engine: texts, and how they came about."""
    prompts = task()
    lengths = np.linspace(LONGEST // 6, LONGEST, PROMPTS * SIBLINGS).astype(int).tolist()
    with started(sam, "coupled", disable_log_stats=False, **arguments) as llm:
        core = llm.llm_engine.engine_core.engine_core
        report = llm.collective_rpc("sam_bind")[0]
        ways.clear()
        together = texts(generate(llm, prompts, SIBLINGS, max_tokens=lengths))
        drained = llm.collective_rpc("sam_drain")[0] or {"requests": {}, "counters": {}}
        statistics = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
        return {
            "scheduler": type(core.scheduler).__name__,
            "why_synchronous": report.get("why_synchronous"),
            "together": together,
            "ways": dict(ways),
            "accepted": sum(book[2] for book in drained["requests"].values()),
            "counters": drained["counters"],
            "statistics": statistics,
            "one by one": come_and_go(llm, prompts, longest=LONGEST, aborts=sam.enabled),
        }


def run() -> dict[str, Any]:
    """What every engine says."""
    ways: Counter[str] = Counter()
    count_ways(ways)
    let_tokens_arrive_late()
    return {name: try_out(*ENGINES[name], ways) for name in ENGINES}
