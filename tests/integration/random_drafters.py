"""Checkpoints with random weights, of drafters that no head is shipped for, for the tiny Qwen3."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.integration.conftest import MODEL

POLICY_LAYERS = 2  # of the policy that has a layer to draft with
_POLICY = json.loads(Path(MODEL, "config.json").read_text(encoding="utf-8"))
_HIDDEN, _WIDTH = _POLICY["hidden_size"], _POLICY["intermediate_size"]
_SIZES = (
    "hidden_size", "intermediate_size", "vocab_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act",
    "rope_parameters", "eos_token_id", "pad_token_id",
)  # fmt: skip
_BASE = {key: _POLICY[key] for key in _SIZES} | {"tie_word_embeddings": False, "dtype": "float32"}


def write_medusa(folder: Path, heads: int) -> None:
    """So many output layers, each behind a block of its own."""
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "dtype": "float32",
        "hidden_size": _HIDDEN, "vocab_size": _POLICY["vocab_size"],
        "num_heads": heads, "num_hidden_layers": 1,
    }  # fmt: skip
    weights = {}
    for i in range(heads):
        weights[f"blocks.{i}.layers.0.weight"] = _random(_HIDDEN, _HIDDEN)
        weights[f"lm_heads.{i}.weight"] = _random(_POLICY["vocab_size"], _HIDDEN)
    _write(folder, config, weights)


def write_policy_with_mtp(folder: Path) -> None:
    """A whole policy of the class MiMo: Qwen2, and a layer that drafts.

    transformers does not know its configuration: `know_mimo` first.
    """
    config = _BASE | {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True,
        "num_hidden_layers": POLICY_LAYERS, "num_nextn_predict_layers": 1,
        "layer_types": ["full_attention"] * POLICY_LAYERS,
    }  # fmt: skip
    draws = "model.mtp_layers.0"
    weights = {
        "model.embed_tokens.weight": _random(_POLICY["vocab_size"], _HIDDEN),
        "lm_head.weight": _random(_POLICY["vocab_size"], _HIDDEN),
        f"{draws}.input_proj.weight": _random(_HIDDEN, 2 * _HIDDEN),
    }
    norms = ["model.norm", f"{draws}.token_layernorm", f"{draws}.hidden_layernorm"]
    norms.append(f"{draws}.final_layernorm")
    for layer in (*(f"model.layers.{i}" for i in range(POLICY_LAYERS)), draws):
        weights |= _layer(layer, bias=True)
        norms += [f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"]
    _write(folder, config, weights | _norms(norms))
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(MODEL, file), folder / file)


def know_mimo() -> None:
    """Have transformers read its configuration; harmless when repeated."""
    from transformers import AutoConfig, Qwen2Config

    kind = type("MiMoConfig", (Qwen2Config,), {"model_type": "mimo"})
    AutoConfig.register("mimo", kind, exist_ok=True)


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return 0.1 * torch.randn(*shape, generator=generator)


def _norms(names: list[str]) -> dict[str, torch.Tensor]:
    return {f"{name}.weight": torch.ones(_HIDDEN) for name in names}


def _layer(name: str, bias: bool = False) -> dict[str, torch.Tensor]:
    """Matrices of a decoder layer, Llama's or Qwen2's."""
    query = _BASE["num_attention_heads"] * _BASE["head_dim"]
    other = _BASE["num_key_value_heads"] * _BASE["head_dim"]
    weights = {
        f"{name}.self_attn.o_proj.weight": _random(_HIDDEN, query),
        f"{name}.mlp.gate_proj.weight": _random(_WIDTH, _HIDDEN),
        f"{name}.mlp.up_proj.weight": _random(_WIDTH, _HIDDEN),
        f"{name}.mlp.down_proj.weight": _random(_HIDDEN, _WIDTH),
    }
    for part, rows in ("q", query), ("k", other), ("v", other):
        weights[f"{name}.self_attn.{part}_proj.weight"] = _random(rows, _HIDDEN)
        if bias:
            weights[f"{name}.self_attn.{part}_proj.bias"] = torch.zeros(rows)
    return weights


def _write(folder: Path, config: Mapping[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
