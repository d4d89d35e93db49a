"""Defines the entry point ``vllm.general_plugins``; every process of vLLM calls it once."""

import contextlib

from sam_rollout.integrations.vllm import ascend


def register() -> None:
    """Apply the wrappers and workarounds that the installed vLLM needs; safe to call repeatedly."""
    from sam_rollout.integrations.vllm.cpu.cpu_workarounds import apply_cpu_workarounds
    from sam_rollout.integrations.vllm.model_drafts.drafter_weights import share_embeddings
    from sam_rollout.integrations.vllm.scheduling.request_rules import keep_rules_with_drafts
    from sam_rollout.integrations.vllm.scheduling.scheduler_choice import choose_schedulers
    from sam_rollout.integrations.vllm.second_runner.runner_choice import allow_second_runner
    from sam_rollout.integrations.vllm.serving.dead_engine import answer_or_die, keep_causes

    keep_causes()
    answer_or_die()
    apply_cpu_workarounds()
    choose_schedulers()
    keep_rules_with_drafts()
    allow_second_runner()
    if ascend.is_installed():  # vllm-ascend has its own drafter classes
        ascend.from_ascend("plugin:register")()
    else:
        with contextlib.suppress(ImportError):  # releases that we do not support start without us
            from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

            share_embeddings(SpecDecodeBaseProposer)
