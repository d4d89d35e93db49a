"""Writes a trained head in the format of the speculators library, which vLLM loads; reads it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sam_rollout.heads.checkpoint import (
    CONFIG,
    TRAINING,
    HeadShape,
    base_of,
    default_layers,
    read_head,
    shape_for,
)
from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.model import Eagle3Head
from sam_rollout.heads.training import Learner

_WEIGHTS = "model.safetensors"


def rope_theta(model_config: Mapping[str, Any]) -> float:
    """The base of the policy's rotary embedding; older files name it at the top."""
    parameters = model_config.get("rope_parameters") or {}
    return float(parameters.get("rope_theta", model_config.get("rope_theta", 10000.0)))


def speculators_config(
    shape: HeadShape, model_config: Mapping[str, Any], model: str, draft_tokens: int
) -> dict[str, Any]:
    """The head's `config.json`.

    Without `model_type` at its top, which would make vLLM take the head for a model of its own.
    """
    theta = rope_theta(model_config)
    method = {
        "proposal_type": "greedy", "speculative_tokens": draft_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    layer = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": model_config.get("max_position_embeddings", 4096),
        "rms_norm_eps": model_config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": shape.draft_vocabulary,
        "target_hidden_size": shape.aux_hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": list(shape.target_layers),
        "dtype": "bfloat16",
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {
                "name_or_path": model,
                "architectures": list(model_config.get("architectures") or []),
            },
        },
    }


def write_head(
    folder: Path, learner: Learner, config: Mapping[str, Any], model_config: Mapping[str, Any],
    training: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write configuration, weights (bfloat16) and what is known of the training.

    The policy's embeddings and output matrix stay out: vLLM shares the policy's own, which follow
    its training. A reduced vocabulary needs its rows of the output matrix, and the maps between
    both vocabularies.
    """
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        k: v.detach().to("cpu", torch.bfloat16) for k, v in learner.head.state_dict().items()
    }
    chosen, size = learner.vocabulary.cpu(), len(learner.policy.output)
    if len(chosen) < size:
        weights["lm_head.weight"] = learner.output.to("cpu", torch.bfloat16)
        weights["d2t"] = chosen - torch.arange(len(chosen))
        weights["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, chosen, True)
    kept = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(kept, folder / _WEIGHTS, metadata={"format": "pt"})
    _write(folder / CONFIG, config)
    _write(folder / TRAINING, {"base_model": base_of(model_config), **training})


def load_head(folder: Path, model_config: Mapping[str, Any]) -> tuple[Eagle3Head, HeadShape]:
    """Read a head that `write_head` wrote for a policy, its whole vocabulary, in float32.

    Raises:
        ConfigError: as `read_head`.
    """
    shape = read_head(folder).shape
    head = Eagle3Head(shape, rope_theta(model_config), model_config.get("rms_norm_eps", 1e-6))
    head.load_state_dict(load_file(folder / _WEIGHTS))
    return head, shape


def write_fresh_head(
    folder: Path, model_config: Mapping[str, Any], model: str, draft_tokens: int
) -> None:
    """Write a head of random weights, always the same, to begin a training with."""
    shape = shape_for(model_config, default_layers(model_config["num_hidden_layers"]), None)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = Eagle3Head(shape, rope_theta(model_config), model_config.get("rms_norm_eps", 1e-6))
    nothing = torch.zeros(shape.vocabulary, 0)
    learner = Learner(head, Policy(None, nothing, nothing), draft_tokens)
    config = speculators_config(shape, model_config, model, draft_tokens)
    write_head(folder, learner, config, model_config, {"updates": 0})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
