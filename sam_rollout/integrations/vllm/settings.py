"""How our configuration travels through vLLM: in, and back out of, ``VllmConfig``.

vLLM hands a custom proposer nothing but its ``VllmConfig``. ``additional_config`` is the field it
keeps for plug-ins, and it reaches every worker process, so the whole configuration goes there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sam_rollout.config import RolloutSamplerConfig, SamConfig

ADDITIONAL_CONFIG_KEY = "sam_rollout"
# vLLM has a second model runner, which it chooses by itself for some models where there is Triton,
# but never with a drafter of our kind. Our samplers belong to the first ("0"), and both sides of a
# comparison should have the same.
MODEL_RUNNER_ENV = "VLLM_USE_V2_MODEL_RUNNER"
ENGINES_OWN_SAMPLER = RolloutSamplerConfig(kind="stock")
PROPOSER_CLASS = "sam_rollout.integrations.vllm.proposer.SamProposer"


def engine_arguments(
    config: SamConfig, sampler: RolloutSamplerConfig = ENGINES_OWN_SAMPLER
) -> dict[str, Any]:
    """Return the vLLM engine arguments that switch drafting on, or only record that it is off.

    Args:
        config: Whether and what to draft.
        sampler: What draws and verifies tokens; by default the engine's own.

    Returns:
        Keyword arguments for ``vllm.LLM`` / ``AsyncEngineArgs`` (also valid below verl's
        ``rollout.engine_kwargs.vllm``): ``additional_config`` and, when enabled,
        ``speculative_config``.
    """
    settings = {
        "sam": config.to_mapping(),
        "rollout_sampler": sampler.to_mapping(),
    }
    arguments: dict[str, Any] = {"additional_config": {ADDITIONAL_CONFIG_KEY: settings}}
    if config.enabled:
        arguments["speculative_config"] = {
            "method": "custom_class",
            "model": PROPOSER_CLASS,
            "num_speculative_tokens": config.max_draft_tokens,
        }
    return arguments


def sam_config_of(vllm_config: Any) -> SamConfig:
    """Read the configuration of drafting back from an engine's ``VllmConfig``.

    Raises:
        ValueError: The engine was started with the proposer class but without our configuration.
    """
    return SamConfig.from_mapping(_settings_of(vllm_config)["sam"])


def sampler_config_of(vllm_config: Any) -> RolloutSamplerConfig:
    """Read the configuration of the samplers back from an engine's ``VllmConfig``.

    Raises:
        ValueError: The engine was started without our configuration.
    """
    return RolloutSamplerConfig.from_mapping(_settings_of(vllm_config)["rollout_sampler"])


def asks_for_ours(vllm_config: Any) -> list[str]:
    """Name the settings for which an engine needs a drafter or samplers of ours; may be none."""
    if not has_settings(vllm_config):
        return []
    sampler = sampler_config_of(vllm_config)
    asked = ["sam.enabled = True"] if sam_config_of(vllm_config).enabled else []
    if sampler.kind != "stock":
        asked.append(f"rollout_sampler.kind = {sampler.kind!r}")
    return asked


def has_settings(vllm_config: Any) -> bool:
    """Whether an engine was started with our configuration, drafts on or off."""
    return ADDITIONAL_CONFIG_KEY in (vllm_config.additional_config or {})


def _settings_of(vllm_config: Any) -> Mapping[str, Any]:
    if not has_settings(vllm_config):
        raise ValueError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] is missing: start the engine with "
            "sam_rollout.integrations.vllm.settings.engine_arguments(SamConfig(...))"
        )
    return vllm_config.additional_config[ADDITIONAL_CONFIG_KEY]
