"""Carries our configuration to an engine's processes, as a text in ``additional_config``."""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from sam_rollout.config import RolloutSamplerConfig, SamConfig

ADDITIONAL_CONFIG_KEY = "sam_rollout"
# Key of `SamplingParams.extra_args`. If its value is true, the request gets no drafts.
WITHOUT_DRAFTS_KEY = "sam_without_drafts"
# With the value "0", vLLM uses its first model runner. Our samplers need this runner, except in the
# trial in `second_runner`.
MODEL_RUNNER_ENV = "VLLM_USE_V2_MODEL_RUNNER"
ENGINES_OWN_SAMPLER = RolloutSamplerConfig(kind="stock")
METHOD = "custom_class"  # vLLM's name for drafters of plug-ins
PROPOSER_CLASS = "sam_rollout.integrations.vllm.drafting.proposer.SamProposer"


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The settings with which an engine starts. If they change, vLLM compiles the model anew."""

    sam: SamConfig
    sampler: RolloutSamplerConfig = ENGINES_OWN_SAMPLER
    record_traces: bool = False  # whether the server keeps token ids

    @classmethod
    @functools.lru_cache(maxsize=8)
    def from_json(cls, text: str) -> EngineSettings:
        """Read settings from a text that ``to_json`` made; results are cached."""
        settings = json.loads(text)
        return cls(
            SamConfig.from_mapping(settings["sam"]),
            RolloutSamplerConfig.from_mapping(settings["sampler"]),
            settings["record_traces"],
        )

    def to_json(self) -> str:
        """Return the settings as JSON; equal settings give equal texts."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def arguments(self) -> dict[str, Any]:
        """Return arguments for ``vllm.LLM``, ``AsyncEngineArgs`` and verl's ``engine_kwargs``."""
        arguments: dict[str, Any] = {"additional_config": {ADDITIONAL_CONFIG_KEY: self.to_json()}}
        if self.sam.enabled:
            speculation: dict[str, Any] = {"method": METHOD, "model": PROPOSER_CLASS}
            if self.sam.drafts_with_model:
                model: Any = self.sam.sources.model
                speculation = {"method": model.method}
                if model.path:
                    speculation["model"] = model.path
                    # The trainer sends only the policy's weights; the drafter's come from files.
                    speculation["draft_load_config"] = {"load_format": "auto"}
                speculation |= model.options
            speculation["num_speculative_tokens"] = self.sam.max_draft_tokens
            arguments["speculative_config"] = speculation
        return arguments

    @property
    def ours(self) -> list[str]:
        """Descriptions of the settings that need our drafter or our samplers, for messages."""
        asked = ["sam.enabled = True"] if self.sam.enabled else []
        if self.sampler.kind != "stock":
            asked.append(f"rollout_sampler.kind = {self.sampler.kind!r}")
        return asked


def engine_arguments(
    sam: SamConfig, sampler: RolloutSamplerConfig = ENGINES_OWN_SAMPLER
) -> dict[str, Any]:
    """Return the engine arguments for these settings; the server does not keep token ids."""
    return EngineSettings(sam, sampler).arguments()


def settings_of(vllm_config: Any) -> EngineSettings:
    """Read the settings back from an engine's ``VllmConfig``.

    Raises:
        ValueError: The engine was started without our settings.
    """
    if not has_settings(vllm_config):
        raise ValueError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] is missing: start the engine with "
            "sam_rollout.integrations.vllm.engine_settings.engine_arguments(SamConfig(...))"
        )
    return EngineSettings.from_json(vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])


def has_settings(vllm_config: Any) -> bool:
    """Whether an engine was started with our settings, with drafts on or off."""
    return ADDITIONAL_CONFIG_KEY in (vllm_config.additional_config or {})


def drafts_here(vllm_config: Any) -> bool:
    """Whether an engine drafts with our proposer; false for subclasses of our proposer."""
    speculation = vllm_config.speculative_config
    return has_model(vllm_config) or (
        speculation is not None
        and speculation.method == METHOD
        and speculation.model == PROPOSER_CLASS
        and has_settings(vllm_config)
    )


def has_model(vllm_config: Any) -> bool:
    """Whether vLLM runs a draft model in addition to our drafter."""
    if vllm_config.speculative_config is None or not has_settings(vllm_config):
        return False
    return settings_of(vllm_config).sam.drafts_with_model
