"""Writes Medusa and MTP drafters with random weights; the repository has no trained ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from tests.integration.conftest import MODEL

POLICY = json.loads(Path(MODEL, "config.json").read_text(encoding="utf-8"))
HIDDEN, VOCABULARY = POLICY["hidden_size"], POLICY["vocab_size"]


class MiMoConfig(Qwen2Config):
    model_type = "mimo"


def write_medusa(folder: Path, heads: int) -> None:
    """Write a Medusa drafter; each of its heads has a block, followed by an output layer."""
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "dtype": "float32",
        "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_heads": heads, "num_hidden_layers": 1,
    }  # fmt: skip
    weights = {}
    for i in range(heads):
        weights[f"blocks.{i}.layers.0.weight"] = _random(HIDDEN, HIDDEN)
        weights[f"lm_heads.{i}.weight"] = _random(VOCABULARY, HIDDEN)
    _write(folder, config, weights)


def write_policy_with_mtp(folder: Path) -> None:
    """Write a whole MiMo policy, which is a Qwen2 with an additional layer that drafts."""
    AutoConfig.register("mimo", MiMoConfig, exist_ok=True)
    own = ("architectures", "model_type", "layer_types", "num_hidden_layers", "max_window_layers")
    sizes = {key: value for key, value in POLICY.items() if key not in own}
    sizes |= {"tie_word_embeddings": False, "dtype": "float32", "attention_bias": True}
    config = MiMoConfig(**sizes | {"num_hidden_layers": 2, "initializer_range": 0.1})
    torch.manual_seed(0)
    weights = Qwen2ForCausalLM(config).state_dict()
    drafts, layer = "model.mtp_layers.0", "model.layers.0"
    weights |= {
        name.replace(layer, drafts): weight.clone()
        for name, weight in weights.items()
        if name.startswith(f"{layer}.")
    }
    weights[f"{drafts}.input_proj.weight"] = _random(HIDDEN, 2 * HIDDEN)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{drafts}.{norm}.weight"] = torch.ones(HIDDEN)
    more = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    _write(folder, config.to_dict() | more, weights)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(MODEL, file), folder / file)


def _random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return 0.1 * torch.randn(*shape, generator=generator)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors")
