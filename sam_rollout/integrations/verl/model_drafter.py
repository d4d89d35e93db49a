"""Checks a run's drafting model, writes the run's first head, and estimates the model's memory."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam_rollout.config import ConfigError, SamConfig
from sam_rollout.heads.checkpoint import HeadShape, shape_for
from sam_rollout.integrations.verl.layouts import RunLayout
from sam_rollout.integrations.verl.policy_model import is_hub_name, lora_settings, read_config
from sam_rollout.integrations.verl.registered_names import FIRST_HEAD_FOLDER
from sam_rollout.integrations.vllm.model_drafts.drafter_check import check_drafter
from sam_rollout.sizing.memory import BF16, rollout_weights
from sam_rollout.sizing.parallelism import DrafterSize, RolloutLayout
from sam_rollout.sizing.shape import ModelShape

# Usual draft vocabulary of public heads (docs/draft_models.md).
USUAL_VOCABULARY = 32_000
# Keys that a config.json has only if the model reads other inputs than text.
_OTHER_INPUTS = ("vision_config", "audio_config", "text_config", "thinker_config")


def is_missing(sam: SamConfig) -> bool:
    """Return whether the drafter's path names a folder that is not on this machine."""
    path = sam.sources.model.path if sam.drafts_with_model else ""
    return bool(path) and not is_hub_name(path) and not Path(path).expanduser().exists()


def check_drafter_belongs(config: DictConfig, sam: SamConfig, shape: ModelShape) -> None:
    """Refuse a drafter that was trained for a policy with different sizes."""
    if sam.drafts_with_model and not is_missing(sam):
        for policy in _policy_configs(config, shape):
            check_drafter(sam.sources.model, policy)


def check_head_training(config: DictConfig, sam: SamConfig, shape: ModelShape) -> None:
    """Refuse to train a head if the policy's hidden states cannot be captured.

    Raises:
        ConfigError: A setting prevents the capture, or the configured head cannot be trained.
    """
    model, strategy = sam.sources.model, config.actor_rollout_ref.actor.strategy
    if not (sam.enabled and model.trains):
        return
    correction = config.algorithm.get("rollout_correction") or {}
    lora = any(value for _, value in lora_settings(config))
    backend = config.actor_rollout_ref.rollout.checkpoint_engine.backend
    for reason, holds in (
        (f"actor_rollout_ref.actor.strategy = fsdp2 or megatron, not {strategy}",
         strategy in ("fsdp2", "megatron")),
        ("algorithm.rollout_correction.bypass_mode = false: hidden states are captured in verl's "
         "forward pass for the old log-probabilities", not correction.get("bypass_mode")),
        ("a policy without LoRA", not lora),
        (f"actor_rollout_ref.rollout.checkpoint_engine.backend = naive, not {backend}",
         backend == "naive"),
        *_rules_of_megatron(config),
        *_rules_of_matrices(config, shape),
    ):  # fmt: skip
        if not holds:
            raise ConfigError(f"{model.train.PATH}.enabled", True, f"needs {reason}")
    if model.path and model.folder is None and not is_missing(sam):
        allowed = "must be a folder on this machine to be trained: download it first"
        raise ConfigError(f"{model.PATH}.path", model.path, allowed)
    if model.folder is not None:
        from sam_rollout.heads.writing import check_trainable

        check_trainable(model.folder, _config_of(shape), f"{model.PATH}.path")


def _rules_of_megatron(config: DictConfig) -> Iterator[tuple[str, bool]]:
    for name in (
        "dynamic_context_parallel", "use_megatron_fsdp",
        # Replaying a CUDA graph runs no hooks, so no states could be captured.
        "override_transformer_config.cuda_graph_impl",
        "override_transformer_config.enable_cuda_graph",
        "override_transformer_config.external_cuda_graph",
    ):  # fmt: skip
        place = f"actor_rollout_ref.actor.megatron.{name}"
        value = str(OmegaConf.select(config, place) or "none").lower()
        yield f"{place} unset or off, not {value}", value == "none"


def _rules_of_matrices(config: DictConfig, shape: ModelShape) -> Iterator[tuple[str, bool]]:
    run = config.actor_rollout_ref
    path, packs = run.model.path, run.rollout.get("quantization")
    yield f"actor_rollout_ref.rollout.quantization = null, not {packs}", packs is None
    for engine in ("fsdp_config", "megatron"):
        qat = ((run.actor.get(engine) or {}).get("qat") or {}).get("enable")
        yield f"actor_rollout_ref.actor.{engine}.qat.enable = false, not true", not qat
    for files in _policy_configs(config, shape):
        others = [key for key in _OTHER_INPUTS if files.get(key)]
        yield f"a policy that reads text alone: {path} has {', '.join(others)}", not others
        packed = files.get("quantization_config") or {}
        how = packed.get("quant_method")
        yield f"a policy that is not quantised: {path} has quantization_config ({how})", not packed


def with_first_head(config: DictConfig, sam: SamConfig) -> SamConfig:
    """Return settings that name the folder of the head with which the run begins.

    A run that trains a head, but names none, begins with a new head with random weights.
    """
    sources: Any = sam.sources  # one field for each registered source
    if not (sam.enabled and sources.model.trains) or sources.model.path:
        return sam
    folder = Path(config.trainer.default_local_dir).absolute() / FIRST_HEAD_FOLDER
    model = replace(sources.model, path=str(folder))
    return replace(sam, sources=replace(sources, model=model))


def write_first_head(config: DictConfig, sam: SamConfig) -> None:
    """If the run begins with a new head, write that head, with random weights."""
    model = with_first_head(config, sam).sources.model
    if model.path == sam.sources.model.path:
        return
    from transformers import AutoConfig

    from sam_rollout.heads.writing import write_fresh_head

    policy = config.actor_rollout_ref.model.path
    sizes = AutoConfig.from_pretrained(policy).to_dict()
    write_fresh_head(Path(model.path), sizes, policy, model.max_tokens)


def _policy_configs(config: DictConfig, shape: ModelShape) -> Iterator[Mapping[str, Any]]:
    yield _config_of(shape)
    if own := read_config(config):
        yield own


def _config_of(shape: ModelShape) -> dict[str, int]:
    return {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
    }


def drafter_size(sam: SamConfig, layout: RunLayout) -> tuple[DrafterSize, str]:
    """Return the drafter's memory on one device, and a text that says where the number is from."""
    model = sam.sources.model
    tensor = model.options.get("draft_tensor_parallel_size") or layout.rollout.tensor
    if sam.drafts_with_model:
        if model.method == "eagle3":
            policy, vocabulary = layout.shape, min(USUAL_VOCABULARY, layout.shape.vocab)
            how = f"memory estimated: one layer of the policy's sizes, {vocabulary:,} tokens"
            if not model.path:  # the run begins with a new head
                vocabulary, how = policy.vocab, "memory of the head that the run begins with"
            # A `ModelShape` with experts has no intermediate size. In the configurations of Qwen3's
            # models with experts, the intermediate size is 3 * hidden.
            wide = {"intermediate_size": policy.intermediate or 3 * policy.hidden}
            return _head_size(shape_for(_config_of(policy) | wide, (), vocabulary), tensor), how
        files = {} if is_missing(sam) else model.read_files_config()
        if model.method == "draft_model" and (shape := ModelShape.of_model(files)):
            weights = rollout_weights(shape, RolloutLayout(tensor, tensor))
            size = DrafterSize(weights, shape.kv_cache_bytes(tensor))
            return size, "memory by its config.json"
    return DrafterSize(), "memory unknown, not counted"


def _head_size(shape: HeadShape, tensor: int) -> DrafterSize:
    """Return a head's memory per rank."""
    sizes = {name: math.prod(size) for name, size in shape.weights.items()}
    whole = sizes.pop("fc.weight")
    divided = sum(size for name, size in sizes.items() if name not in ("t2d", "d2t"))
    kv_heads = max(1, shape.kv_heads // tensor)
    return DrafterSize(BF16 * (whole + divided / tensor), 2 * BF16 * kv_heads * shape.head_dim)
