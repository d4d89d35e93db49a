"""Checks that a draft model fits the policy, before weights are loaded."""

import logging
from collections.abc import Mapping
from typing import Any

from sam_rollout.config import ConfigError
from sam_rollout.heads.checkpoint import check_belongs, read_head
from sam_rollout.sources.model import ModelSourceConfig

logger = logging.getLogger(__name__)


def check_drafter(
    model: ModelSourceConfig, policy: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> None:
    """Compare a draft model with the policy.

    Args:
        policy: content of the policy's `config.json`; missing keys are not compared.
        config: content of the drafter's `config.json`; None if the drafter's folder shall be read.

    Raises:
        ConfigError: the drafter was made for another model, its folder cannot be read, or it
            cannot draft as many tokens as `model.max_tokens` asks for.
    """
    field = f"{model.PATH}.path"
    if config is None:
        config = model.read_files_config()
        if model.folder is not None and model.method == "eagle3":
            check_belongs(read_head(model.folder, field), policy, field)
            return
    made_for = {"hidden_size": config.get("target_hidden_size") or config.get("hidden_size")}
    if model.method == "draft_model":
        made_for = {}  # a separate model has hidden states of its own
    if not model.options.get("use_heterogeneous_vocab"):
        made_for["vocab_size"] = config.get("vocab_size")
    for key, value in made_for.items():
        if None not in (value, policy.get(key)) and value != policy[key]:
            allowed = f"made for a model with {key} = {value}, not {policy[key]}"
            raise ConfigError(field, model.path, allowed)
    heads = config.get("num_heads", config.get("medusa_num_heads"))
    if model.method == "medusa" and heads is not None and heads < model.max_tokens:
        allowed = f"must be at most {heads}, the output layers of {model.path}"
        raise ConfigError(f"{model.PATH}.max_tokens", model.max_tokens, allowed)


def check_engines_drafter(model: ModelSourceConfig, vllm_config: Any) -> None:
    """Compare an engine's drafter with the policy; give a Medusa head only the layers it needs.

    Raises:
        ConfigError: see `check_drafter`. With engines in lockstep, it is also an error if a text
            may be too long for the drafter. Other engines only log a warning.
    """
    # This module imports torch; the doctor, which imports this one, runs without torch.
    from sam_rollout.integrations.vllm.scheduling.dp_exchange import steps_in_lockstep

    speculation = vllm_config.speculative_config
    policy, drafter = speculation.target_model_config, speculation.draft_model_config
    if not model.path:  # the method uses layers of the policy, or no model
        return
    # A model on the hub has no folder yet, because vLLM fetches it later.
    config = drafter.hf_config.to_dict() if model.folder is None else None
    check_drafter(model, policy.hf_text_config.to_dict(), config)
    if model.method == "medusa":
        # vLLM 0.31 makes one output layer for each of the engine's k draft tokens, even if the
        # drafter has weights for fewer layers. It needs one layer for each token that it drafts.
        drafter.hf_config.num_lookahead_tokens = model.max_tokens
    # In steps with a text that the drafter cannot read, vLLM skips the drafter (by the source of
    # vLLM 0.24, 0.28 and 0.31).
    if drafter.max_model_len < policy.max_model_len:
        note = (
            f"{model.PATH}.path = {model.path!r} reads up to {drafter.max_model_len} tokens "
            f"(max_position_embeddings), but a text of the engine has up to {policy.max_model_len}:"
            " in steps with a longer text, vLLM does not run it for any request "
            "(docs/draft_models.md)"
        )
        if steps_in_lockstep(vllm_config):
            # Engines in lockstep would wait forever for an engine that skips its drafter.
            allowed = f"{note}; with engines in lockstep, positions must not be fewer"
            raise ConfigError(f"{model.PATH}.path", model.path, allowed)
        logger.warning("%s", note)
