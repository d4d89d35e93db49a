"""How our configuration travels through vLLM: in, and back out of, ``VllmConfig``.

vLLM hands a custom proposer nothing but its ``VllmConfig``. ``additional_config`` is the field it
keeps for plug-ins, and it reaches every process of an engine, so ``EngineSettings`` travel there,
as one text that is written once and read once in each process.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from typing import Any

from sam_rollout.config import ConfigError, RolloutSamplerConfig, SamConfig

ADDITIONAL_CONFIG_KEY = "sam_rollout"
# Of `SamplingParams.extra_args`: true for a request that is to be sampled without drafts.
WITHOUT_DRAFTS_KEY = "sam_without_drafts"
# vLLM has a second model runner, which it chooses by itself for some models where there is Triton,
# but never with a drafter of our kind. Our samplers belong to the first ("0"), and both sides of a
# comparison should have the same.
MODEL_RUNNER_ENV = "VLLM_USE_V2_MODEL_RUNNER"
# For engines started without a word about samplers: plain vLLM use, and programs that compare with
# it. Runs of the recipe always say one; their default is that of RolloutSamplerConfig.
ENGINES_OWN_SAMPLER = RolloutSamplerConfig(kind="stock")
METHOD = "custom_class"  # vLLM's name for drafters of others
PROPOSER_CLASS = "sam_rollout.integrations.vllm.drafting.proposer.SamProposer"


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with; no more than that: vLLM compiles anew when it changes.

    Attributes:
        sam: Whether and what to draft.
        sampler: What draws and verifies tokens.
        record_traces: Whether the server keeps token ids.

    Raises:
        ConfigError: Drafts are to share noise that the sampler has not.
    """

    sam: SamConfig
    sampler: RolloutSamplerConfig = ENGINES_OWN_SAMPLER
    record_traces: bool = False

    def __post_init__(self) -> None:
        model = self.sam.sources.model
        if self.sam.drafts_with_model and model.sampled and self.sampler.kind != "coupled":
            allowed = f"needs rollout_sampler=coupled, not {self.sampler.kind!r}"
            raise ConfigError("sam.sources.model.sampled", model.sampled, allowed)

    @classmethod
    @functools.lru_cache(maxsize=8)
    def from_json(cls, text: str) -> EngineSettings:
        """Read what ``to_json`` wrote; a process does so once.

        Raises:
            ConfigError: A value is not allowed.
        """
        settings = json.loads(text)
        return cls(
            SamConfig.from_mapping(settings["sam"]),
            RolloutSamplerConfig.from_mapping(settings["sampler"]),
            settings["record_traces"],
        )

    def to_json(self) -> str:
        """Write the settings for the journey to an engine; the same settings are the same text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    def arguments(self) -> dict[str, Any]:
        """The vLLM engine arguments that switch drafting on, or only record that it is off.

        Returns:
            Keyword arguments for ``vllm.LLM`` / ``AsyncEngineArgs`` (also valid below verl's
            ``rollout.engine_kwargs.vllm``): ``additional_config`` and, when enabled,
            ``speculative_config``.
        """
        arguments: dict[str, Any] = {"additional_config": {ADDITIONAL_CONFIG_KEY: self.to_json()}}
        if self.sam.enabled:
            model = self.sam.sources.model
            arguments["speculative_config"] = {
                **(
                    _speculation_of(model)
                    if self.sam.drafts_with_model
                    else {"method": METHOD, "model": PROPOSER_CLASS}
                ),
                "num_speculative_tokens": self.sam.max_draft_tokens,
            }
        return arguments

    @property
    def ours(self) -> list[str]:
        """The settings for which an engine needs a drafter or samplers of ours; may be none."""
        asked = ["sam.enabled = True"] if self.sam.enabled else []
        if self.sampler.kind != "stock":
            asked.append(f"rollout_sampler.kind = {self.sampler.kind!r}")
        return asked


def _speculation_of(model: Any) -> dict[str, Any]:
    """VLLM's configuration of the drafter that it runs itself."""
    speculation: dict[str, Any] = {"method": model.method}
    if model.path:
        speculation["model"] = model.path
        # A trainer has the engine start with random weights, and sends the policy's: the drafter's
        # are nobody's but the file's.
        speculation["draft_load_config"] = {"load_format": "auto"}
    return speculation | model.options


def engine_arguments(
    sam: SamConfig, sampler: RolloutSamplerConfig = ENGINES_OWN_SAMPLER
) -> dict[str, Any]:
    """Return the engine arguments of settings without traces."""
    return EngineSettings(sam, sampler).arguments()


def settings_of(vllm_config: Any) -> EngineSettings:
    """Read the settings back from an engine's ``VllmConfig``.

    Raises:
        ValueError: The engine was started without them.
        ConfigError: A value is not allowed.
    """
    if not has_settings(vllm_config):
        raise ValueError(
            f"additional_config[{ADDITIONAL_CONFIG_KEY!r}] is missing: start the engine with "
            "sam_rollout.integrations.vllm.engine_settings.engine_arguments(SamConfig(...))"
        )
    return EngineSettings.from_json(vllm_config.additional_config[ADDITIONAL_CONFIG_KEY])


def has_settings(vllm_config: Any) -> bool:
    """Whether an engine was started with our settings, drafts on or off."""
    return ADDITIONAL_CONFIG_KEY in (vllm_config.additional_config or {})


def drafts_here(vllm_config: Any) -> bool:
    """Whether an engine drafts with our proposer itself, not with one that is built on it."""
    speculation = vllm_config.speculative_config
    return has_model(vllm_config) or (
        speculation is not None
        and speculation.method == METHOD
        and speculation.model == PROPOSER_CLASS
        and has_settings(vllm_config)
    )


def has_model(vllm_config: Any) -> bool:
    """Whether vLLM runs a drafter of its own for us."""
    if vllm_config.speculative_config is None or not has_settings(vllm_config):
        return False
    return settings_of(vllm_config).sam.drafts_with_model
