"""Chooses the scheduler of an engine with our drafter.

vLLM has a list of draft methods with which it schedules asynchronously. Our method is added to this
list while an engine's configuration is checked. An engine that schedules synchronously takes drafts
from a step's output (`drafts_with_output.py`), if our scheduler is known to fit the vLLM release.
"""

import os
from typing import Any, Literal, get_args

from packaging.version import Version

from sam_rollout.config import ConfigError
from sam_rollout.integrations.vllm import ascend
from sam_rollout.integrations.vllm.engine_settings import (
    MODEL_RUNNER_ENV,
    drafts_here,
    has_model,
    settings_of,
)
from sam_rollout.integrations.vllm.hybrids import leave_out_drafts
from sam_rollout.integrations.vllm.model_drafts.drafter_check import check_engines_drafter
from sam_rollout.integrations.vllm.scheduling.dp_exchange import steps_in_lockstep
from sam_rollout.integrations.vllm.scheduling.request_rules import mark_as_ours
from sam_rollout.integrations.vllm.wrapping import wrap_once
from sam_rollout.sources.model import BY_PASSES

# Both of our schedulers are known to fit these releases of vLLM (see tests/contracts/rows).
KNOWN_RELEASES = ((0, 24), (0, 31))
# With a draft model, our synchronous scheduler is known to fit these releases of vLLM.
KNOWN_WITH_MODEL = ((0, 23), *KNOWN_RELEASES)
SCHEDULER_CLASS = "sam_rollout.integrations.vllm.scheduling.async_scheduler.LateBindingScheduler"
SYNC_SCHEDULER_CLASS = "sam_rollout.integrations.vllm.scheduling.drafts_with_output.SyncScheduler"


def why_synchronous(vllm_config: Any, vllm_version: str) -> str:
    """Return why an engine with our drafter cannot schedule asynchronously; empty if it can."""
    if settings_of(vllm_config).sam.scheduling == "sync":
        return "sam.scheduling = 'sync'"
    method = settings_of(vllm_config).sam.sources.model.method
    if has_model(vllm_config) and method not in BY_PASSES:
        return f"{method} reads on the host what was sampled"
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    if ascend.is_installed():
        rule = ascend.from_ascend("versions:why_synchronous")
        if reason := rule(vllm_config, vllm_version):
            return reason
    elif Version(vllm_version).release[:2] not in KNOWN_RELEASES:
        known = " and ".join(".".join(map(str, release)) for release in KNOWN_RELEASES)
        return f"late binding is known to fit vLLM {known}, not {vllm_version}"
    outputs = getattr(vllm_config, "aux_output_config", model)  # part of `model` before vLLM 0.31
    ours = None, SCHEDULER_CLASS, SYNC_SCHEDULER_CLASS
    reasons = {
        "drafts are not bound late in vLLM's second model runner":
            os.environ.get(MODEL_RUNNER_ENV) == "1",
        "pipeline stages pass on only one token per request": parallel.pipeline_parallel_size > 1,
        "engines that share experts draft in the same step": steps_in_lockstep(vllm_config),
        "ranks that share a prompt would draft each for itself":
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
        "experts are told for scheduled tokens, but late binding drops some of them":
            outputs.enable_return_routed_experts,
        "the engine was started with another scheduler_cls":
            vllm_config.scheduler_config.scheduler_cls not in ours,
        "inputs other than text, and KV connectors, were not tried":
            model.uses_mrope or model.is_multimodal_model or model.enable_prompt_embeds
            or vllm_config.kv_transfer_config is not None,
    }  # fmt: skip
    return next((reason for reason, holds in reasons.items() if holds), "")


def has_places(vllm_config: Any) -> bool:
    """Whether the scheduler reserves placeholders that the worker fills with drafts."""
    return vllm_config.scheduler_config.scheduler_cls == SCHEDULER_CLASS


def come_with_output(vllm_config: Any) -> bool:
    """Whether the scheduler takes drafts from a step's output."""
    return vllm_config.scheduler_config.scheduler_cls == SYNC_SCHEDULER_CLASS


def scheduler_of(vllm_config: Any, vllm_version: str) -> str | None:
    """Return the name of our scheduler for an engine with our drafter; None means vLLM's own."""
    if vllm_config.scheduler_config.async_scheduling:
        return SCHEDULER_CLASS
    releases = KNOWN_WITH_MODEL if has_model(vllm_config) else KNOWN_RELEASES
    known = Version(vllm_version).release[:2] in releases
    # With pipeline stages, several steps run at once. Then vLLM's own scheduler is used.
    alone = vllm_config.parallel_config.pipeline_parallel_size == 1
    return SYNC_SCHEDULER_CLASS if known and alone else None


def settle_for_model(vllm_config: Any, vllm_version: str) -> None:
    """Check and complete the configuration of an engine that also runs a draft model.

    Raises:
        ConfigError: The engine cannot run a draft model, or the model does not fit the policy.
    """
    runner = os.environ.setdefault(MODEL_RUNNER_ENV, "0")
    if runner == "1":
        raise ConfigError(
            MODEL_RUNNER_ENV, runner, "must be 0: sam.sources.model needs vLLM's first model runner"
        )
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        raise ConfigError(
            "pipeline_parallel_size",
            vllm_config.parallel_config.pipeline_parallel_size,
            "must be 1 with sam.sources.model: a head cannot share the embedding of another stage",
        )
    if scheduler_of(vllm_config, vllm_version) is None:
        known = ", ".join(".".join(map(str, release)) for release in KNOWN_WITH_MODEL)
        raise ConfigError(
            "sam.sources.model.enabled", True, f"is known to fit vLLM {known}, not {vllm_version}"
        )
    check_engines_drafter(settings_of(vllm_config).sam.sources.model, vllm_config)


def choose_schedulers() -> None:
    """Give engines with our drafter one of our schedulers; safe to call repeatedly."""
    import vllm.config.vllm as module

    wrap_once(module.VllmConfig, "__post_init__", _choosing)


def _choosing(original: Any) -> Any:
    import vllm
    import vllm.config.vllm as module

    def check(self: Any) -> None:
        if not drafts_here(self) or leave_out_drafts(self):
            original(self)
            return
        mark_as_ours(self.speculative_config)
        asked = self.scheduler_config.async_scheduling
        ahead = asked is not False and not why_synchronous(self, vllm.__version__)
        if has_model(self):
            if not ahead:
                self.scheduler_config.async_scheduling = False
            settle_for_model(self, vllm.__version__)
        names = module.NgramGPUTypes
        if ahead:
            method = self.speculative_config.method
            module.NgramGPUTypes = Literal[(*get_args(names), method)]
        try:
            original(self)
        finally:
            module.NgramGPUTypes = names
        scheduler = self.scheduler_config
        # The platform may have chosen a worker for which our drafter needs synchronous scheduling.
        if scheduler.async_scheduling and why_synchronous(self, vllm.__version__):
            scheduler.async_scheduling = False
        if scheduler.async_scheduling or scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = scheduler_of(self, vllm.__version__)

    return check
