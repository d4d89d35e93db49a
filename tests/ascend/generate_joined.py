"""Engines of vllm-ascend in which a head drafts, alone and joined with texts."""

from __future__ import annotations

from typing import Any

import torch

from tests.ascend.generate import started  # before vLLM: it bends the process to the CPU

# isort: split
from sam_rollout.config import GateConfig, SamConfig, SourcesConfig
from tests.ascend.conftest import MODEL
from tests.ascend.generate_ahead import SIBLINGS, SMALL, task
from tests.integration.responses import generate, texts

HEAD = f"{MODEL}_eagle3"
TOKENS, DRAFTED = 80, 3
FAILS_AT = 40  # call of the head
OFF = SamConfig(enabled=False)


def joined(*texts: str, k: int = DRAFTED, gate: str = "threshold", **model: Any) -> SamConfig:
    """A head and the named sources; the gate is open for any batch unless it is closed."""
    sources: dict[str, dict] = {
        name: {"enabled": name in texts} for name in ("own", "prompt", "run")
    }
    sources["model"] = {"enabled": True, "path": HEAD, "max_tokens": DRAFTED, **model}
    return SamConfig(
        max_draft_tokens=k,
        gate=GateConfig(gate, 10_000),
        sources=SourcesConfig.from_mapping(sources),
    )


# Name -> what drafts, what samples, and further arguments of the engine.
ENGINES: dict[str, tuple[SamConfig, str, dict[str, Any]]] = {
    "off": (OFF, "coupled", {}),
    "alone": (joined(), "coupled", {}),
    "joined": (joined("own", "prompt", k=8), "coupled", SMALL),
    "closed": (joined("own", gate="closed"), "coupled", {}),
    "fails": (joined("own"), "coupled", {}),
    "drawn": (joined(sampled=True), "coupled_gumbel", {}),  # at the end: it changes the model
}


def count_calls(head: Any, fails_at: int = 0) -> list[None]:
    """Note every forward pass of a head, and have it fail in one."""
    forward, calls = head.forward, []

    def noted(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == fails_at:
            raise RuntimeError("broken on purpose")
        return forward(*args, **kwargs)

    head.forward = noted
    return calls


def know_nothing(*models: Any) -> None:
    """Have models say that every token is as likely: noise alone draws."""
    for model in models:
        type(model).compute_logits = lambda _self, hidden, *_: torch.zeros(len(hidden), 512)


def try_out(name: str) -> dict[str, Any]:
    """Answer the prompts in an engine: texts, and how they came about."""
    sam, kind, arguments = ENGINES[name]
    with started(sam, kind, **arguments) as llm:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        report = llm.collective_rpc("sam_bind")[0]
        calls, shared = [], []
        if sam.enabled:
            head, policy = runner.drafter.model, runner.model
            shared = [
                head.lm_head is policy.lm_head,
                head.model.embed_tokens is policy.model.embed_tokens,
            ]
            calls = count_calls(head, FAILS_AT if name == "fails" else 0)
            if name == "drawn":
                know_nothing(head, policy)
        found = texts(
            generate(llm, task(), SIBLINGS, max_tokens=TOKENS, ignore_eos=name == "drawn")
        )
        drained = llm.collective_rpc("sam_drain")[0] or {"requests": {}, "counters": {}}
        books = drained["requests"].values()
        result = {
            "report": report,
            "asynchronous": runner.use_async_scheduling,
            "texts": found,
            "calls": len(calls),
            "shared": shared,
            "counters": drained["counters"],
            "drafted": sum(book[1] for book in books),
            "accepted": sum(book[2] for book in books),
        }
        if sam.enabled:
            result["left_behind"] = [
                runner.drafter.num_speculative_tokens != sam.max_draft_tokens,
                "compute_logits" in vars(head),
            ]
        if name == "closed":
            llm.collective_rpc("sam_probe", args=(True,))
            generate(llm, task(), 1, max_tokens=32, temperature=0.0)
            result["probe"] = llm.collective_rpc("sam_probe", args=(False,))
        return result


def run() -> dict[str, Any]:
    """What every engine says."""
    return {name: try_out(name) for name in ENGINES}
