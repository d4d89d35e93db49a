"""The check of vllm-ascend's own options that do not work with our samplers."""

from __future__ import annotations

from typing import Any

from sam_rollout.config import ConfigError

# Field of vllm-ascend's additional_config -> why it has to stay off.
REFUSED = {
    "enable_reduce_sample": "sampling from parts of the vocabulary on several devices",
    "enable_async_exponential": "noise that is drawn before the logits are known",
    "rejection_sampler_config.enable_block_verify": "accepting drafts by blocks",
    "rejection_sampler_config.enable_entropy_verify": "accepting more than the target would sample",
}


def check_options(ascend_config: Any) -> None:
    """Refuse options that would be ignored silently, or would change what is sampled.

    Raises:
        ConfigError: One of ``REFUSED`` is on.
    """
    for field in REFUSED:
        value = ascend_config
        for name in field.split("."):
            value = getattr(value, name)
        refuse(field, value)


def refuse(field: str, value: Any) -> None:
    """Raise ``ConfigError`` if `field`, a key of ``REFUSED``, is on."""
    if value:
        raise ConfigError(
            f"additional_config.{field}",
            value,
            f"must be false ({REFUSED[field]}) unless rollout_sampler.kind = 'stock'",
        )
