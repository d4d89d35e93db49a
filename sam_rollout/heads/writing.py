"""Makes, loads and writes trainable heads; files have the format of the speculators library."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sam_rollout.core.json_values import dumps
from sam_rollout.core.settings import ConfigError
from sam_rollout.heads.checkpoint import (
    BASE_KEYS,
    CONFIG,
    QWEN3,
    TRAINING,
    HeadShape,
    check_belongs,
    default_layers,
    read_head,
    read_json,
    shape_for,
    vllm_name,
)
from sam_rollout.heads.eagle3 import Eagle3Head
from sam_rollout.telemetry.records import write_by_rename

_WEIGHTS = "model.safetensors"
#: `Eagle3Head` supports only these values in a head's configuration; keys may be missing.
_COMPUTED = {
    "norm_before_fc": False, "fc_norm": False, "norm_output": False, "attention_bias": False,
    "mlp_bias": False, "hidden_act": "silu", "logit_scale": 1.0, "partial_rotary_factor": 1.0,
    "is_causal": True, "quantization_config": None,
}  # fmt: skip


class TrainableHead(NamedTuple):
    """A head with its vocabulary and output matrix."""

    head: Eagle3Head
    shape: HeadShape
    vocabulary: Tensor | None  # The tokens that the head can draft, ascending; None means all.
    # The head's own output matrix, [draft vocabulary, hidden]; None: the policy's matrix.
    output: Tensor | None


def _speculators_config(
    shape: HeadShape, model_config: Mapping[str, Any], model: str, draft_tokens: int
) -> dict[str, Any]:
    """Return the head's `config.json`.

    The key `model_type` is left out, because it would make vLLM load the head as a whole model.
    """
    kind, name = ("qwen3", "Qwen3") if shape.architecture == QWEN3 else ("llama", "Llama")
    method = {
        "proposal_type": "greedy", "speculative_tokens": draft_tokens, "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }  # fmt: skip
    layer = {
        "model_type": kind,
        "architectures": [f"{name}ForCausalLM"],
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": model_config.get("max_position_embeddings", 4096),
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
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
        "norm_before_residual": shape.norm_before_residual,
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
    folder: Path, trained: TrainableHead, model_config: Mapping[str, Any], model: str,
    draft_tokens: int, training: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write a head's configuration, weights (bfloat16) and the record of its training.

    The policy's embeddings and output matrix are left out, because the head uses the matrices that
    the policy has in vLLM.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = trained.head.state_dict()
    weights = {k: v.detach().to("cpu", torch.bfloat16) for k, v in state.items()}
    if trained.output is not None:
        weights["lm_head.weight"] = trained.output.to("cpu", torch.bfloat16)
    if trained.vocabulary is not None:
        chosen, size = trained.vocabulary.cpu(), trained.shape.vocabulary
        weights["d2t"] = chosen - torch.arange(len(chosen))
        weights["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill_(0, chosen, True)
    kept = {name: tensor.contiguous() for name, tensor in weights.items()}
    write_by_rename(
        folder / _WEIGHTS, lambda path: save_file(kept, path, metadata={"format": "pt"})
    )
    _write(folder / CONFIG, _speculators_config(trained.shape, model_config, model, draft_tokens))
    base = {key: model_config[key] for key in BASE_KEYS if key in model_config}
    _write(folder / TRAINING, {"base_model": base, **training})


def fresh_head(
    model_config: Mapping[str, Any], seed: int, draft_vocabulary: int | None = None,
    place: str = "model",
) -> TrainableHead:  # fmt: skip
    """Make a head with random weights for a policy; global random generators are not changed."""
    layers = default_layers(model_config.get("num_hidden_layers", 0))
    shape = shape_for(model_config, layers, draft_vocabulary, place)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return TrainableHead(Eagle3Head(shape), shape, None, None)


def load_head(folder: Path, model_config: Mapping[str, Any], field: str = "head") -> TrainableHead:
    """Load a head for a policy, in float32; the head's own embeddings are left out."""
    shape, place = check_trainable(folder, model_config, field), f"{field}: {folder}"
    weights: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        weights |= {vllm_name(name): tensor for name, tensor in load_file(file).items()}
    output, d2t = weights.pop("lm_head.weight", None), weights.pop("d2t", None)
    vocabulary = None
    if d2t is not None and shape.draft_vocabulary < shape.vocabulary:
        vocabulary = d2t.long() + torch.arange(len(d2t))
        ends = int(vocabulary[0]), int(vocabulary[-1])
        if ends[0] < 0 or ends[1] >= shape.vocabulary or (vocabulary.diff() <= 0).any():
            raise ConfigError(f"{place}: d2t", ends, "must name tokens of the policy, ascending")
    head = Eagle3Head(shape)
    known = head.state_dict().keys()
    if others := weights.keys() - known - {"t2d", "embed_tokens.weight"}:
        raise ConfigError(f"{place}: weights", sorted(others), "cannot be trained here")
    head.load_state_dict({name: weights[name] for name in known})
    return TrainableHead(head, shape, vocabulary, None if output is None else output.float())


def check_trainable(
    folder: Path, model_config: Mapping[str, Any], field: str = "head"
) -> HeadShape:
    """Check a head's sizes and settings as `load_head` does, but do not load its weights."""
    found = read_head(folder, field)
    check_belongs(found, model_config, field)
    layers = found.shape.target_layers or default_layers(model_config["num_hidden_layers"])
    shape = replace(found.shape, target_layers=tuple(layers))
    config, place = read_json(folder / CONFIG, field, str(folder)), f"{field}: {folder}"
    parts = (config.get("transformer_layer_config"), config, config.get("eagle_config"))
    given = {key: value for part in parts for key, value in (part or {}).items()}
    for key, computed in _COMPUTED.items():
        if (value := given.get(key)) not in (None, computed):
            raise ConfigError(f"{place}: {key}", value, f"must be {computed} to be trained here")
    for key in ("rope_parameters", "rope_scaling"):
        rope = given.get(key) or {}
        if rope.get("rope_type", rope.get("type", "default")) != "default":
            raise ConfigError(f"{place}: {key}", rope, "must be the default to be trained here")
    if "sliding_attention" in (given.get("layer_types") or ()):
        raise ConfigError(f"{place}: layer_types", given["layer_types"], "must be full_attention")
    if shape.hidden_size != shape.aux_hidden_size:
        allowed = f"must be {shape.aux_hidden_size} as in the policy, to be trained here"
        raise ConfigError(f"{place}: hidden_size", shape.hidden_size, allowed)
    # transformers normalises the state after the last layer, but vLLM does not. So the head would
    # learn from states that it does not get in the engine.
    if max(shape.target_layers) >= model_config["num_hidden_layers"]:
        allowed = "must be before the policy's last layer to be trained here"
        raise ConfigError(f"{place}: target layers", list(shape.target_layers), allowed)
    return shape


def write_fresh_head(
    folder: Path, model_config: Mapping[str, Any], model: str, draft_tokens: int
) -> None:
    """Write a new head; its random weights are always the same."""
    head = fresh_head(model_config, seed=0)
    write_head(folder, head, model_config, model, draft_tokens, {"updates": 0})


def _write(path: Path, content: Mapping[str, Any]) -> None:
    text = dumps(content, indent=2) + "\n"
    write_by_rename(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
