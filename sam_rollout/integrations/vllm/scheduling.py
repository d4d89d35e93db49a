"""Whether an engine with our drafter may schedule asynchronously, and how vLLM is told.

vLLM keeps a list of methods of speculation that go together with asynchronous scheduling, all of
which draft on the device, and schedules synchronously for every other. Ours drafts on the host and
binds its drafts late (`late_binding.py`): while an engine's configuration is checked, our method
stands on the list. This can go when vLLM asks the proposer instead.
"""

from __future__ import annotations

import functools
import os
from typing import Any, Literal, get_args

from packaging.version import Version

from sam_rollout.integrations.vllm.settings import (
    MODEL_RUNNER_ENV,
    PROPOSER_CLASS,
    has_settings,
    settings_of,
)

# Releases that the contract rows of late binding are checked against.
KNOWN_RELEASES = ((0, 24), (0, 31))
SCHEDULER_CLASS = "sam_rollout.integrations.vllm.async_scheduler.LateBindingScheduler"
_METHOD = "custom_class"


def drafts_here(vllm_config: Any) -> bool:
    """Whether an engine drafts with our proposer itself, not with one that is built on it."""
    speculation = vllm_config.speculative_config
    return (
        speculation is not None
        and speculation.method == _METHOD
        and speculation.model == PROPOSER_CLASS
        and has_settings(vllm_config)
    )


def why_synchronous(vllm_config: Any, vllm_version: str) -> str:
    """Say why an engine with our drafter cannot schedule asynchronously; empty if it can."""
    from sam_rollout.integrations.vllm.proposer import steps_in_lockstep

    if settings_of(vllm_config).sam.scheduling == "sync":
        return "sam.scheduling = 'sync'"
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if Version(vllm_version).release[:2] not in KNOWN_RELEASES:
        known = " and ".join(".".join(map(str, release)) for release in KNOWN_RELEASES)
        return f"late binding is known to fit vLLM {known}, not {vllm_version}"
    for found, reason in (
        (
            os.environ.get(MODEL_RUNNER_ENV) == "1",
            "drafts are not bound late in vLLM's second model runner",
        ),
        (parallel.pipeline_parallel_size > 1, "pipeline stages pass on one token a request"),
        (steps_in_lockstep(vllm_config), "engines that share experts draft in the same step"),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "ranks that share a prompt would draft each for itself",
        ),
        (model.is_hybrid, "states of linear attention are counted by drafts on the device"),
        (model.uses_mrope, "positions of M-RoPE were not tried"),
        (
            model.is_multimodal_model or model.enable_prompt_embeds,
            "inputs are embedded before drafts are there",
        ),
        (
            _returns_experts(vllm_config),
            "experts are told by the number of scheduled tokens, which late binding changes",
        ),
        (
            vllm_config.scheduler_config.scheduler_cls not in (None, SCHEDULER_CLASS),
            "the engine was started with another scheduler_cls",
        ),
        (vllm_config.kv_transfer_config is not None, "KV connectors were not tried"),
    ):
        if found:
            return reason
    return ""


def _returns_experts(vllm_config: Any) -> bool:
    outputs = getattr(vllm_config, "aux_output_config", vllm_config.model_config)  # before 0.31
    return outputs.enable_return_routed_experts


def allow_asynchronous_scheduling() -> None:
    """Let engines with our drafter schedule asynchronously; harmless when repeated."""
    import vllm
    import vllm.config.vllm as module

    original = module.VllmConfig.__post_init__
    if Version(vllm.__version__).release[:2] not in KNOWN_RELEASES:
        return
    if getattr(original, "sam_rollout", False):
        return

    @functools.wraps(original)
    def check(self: Any) -> None:
        if (
            self.scheduler_config.async_scheduling is False
            or not drafts_here(self)
            or why_synchronous(self, vllm.__version__)
        ):
            original(self)
            return
        names = module.NgramGPUTypes
        module.NgramGPUTypes = Literal[(*get_args(names), _METHOD)]
        try:
            original(self)
        finally:
            module.NgramGPUTypes = names
        if self.scheduler_config.async_scheduling and self.scheduler_config.scheduler_cls is None:
            self.scheduler_config.scheduler_cls = SCHEDULER_CLASS

    check.__dict__["sam_rollout"] = True
    module.VllmConfig.__post_init__ = check
