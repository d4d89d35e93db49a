"""Reads the folder of an EAGLE-3 head, and checks that the head fits its policy, all without torch.

A head may have the format of the speculators library, in which this package writes heads, or the
format of Hugging Face llamas (`LlamaForCausalLMEagle3`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sam_rollout.core.json_values import read_object
from sam_rollout.core.settings import ConfigError

CONFIG, TRAINING = "config.json", "training.json"
LLAMA, QWEN3 = "Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"
_ARCHITECTURES = {"llama": LLAMA, "qwen3": QWEN3}
#: A head records its policy's values of these keys, and fits only policies with the same values.
BASE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "tie_word_embeddings",
)  # fmt: skip


@dataclass(frozen=True)
class HeadShape:
    """The sizes of a head, which has one decoder layer: a llama layer or a Qwen3 layer."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    draft_vocabulary: int  # Number of tokens that the head can draft, at most `vocabulary`.
    # The head reads the policy's hidden states after these layers, counted as in vLLM. An empty
    # tuple stands for vLLM's default layers.
    target_layers: tuple[int, ...]
    aux_hidden_size: int  # Size of the policy's hidden states.
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    # True: the attention's output is added to the normalised hidden state. False: it is added to
    # the hidden state before normalisation.
    norm_before_residual: bool = False

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors that vLLM loads."""
        hidden, width = self.hidden_size, self.heads * self.head_dim
        states = self.aux_hidden_size * (len(self.target_layers) or 3)
        layer = {
            "input_layernorm": (hidden,),
            "hidden_norm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (width, 2 * hidden),
            "self_attn.k_proj": (self.kv_heads * self.head_dim, 2 * hidden),
            "self_attn.v_proj": (self.kv_heads * self.head_dim, 2 * hidden),
            "self_attn.o_proj": (hidden, width),
            "mlp.gate_proj": (self.intermediate_size, hidden),
            "mlp.up_proj": (self.intermediate_size, hidden),
            "mlp.down_proj": (hidden, self.intermediate_size),
        }
        if self.architecture == QWEN3:
            layer |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, states)}
        shapes |= {f"layers.0.{name}.weight": shape for name, shape in layer.items()}
        shapes["norm.weight"] = (hidden,)
        if self.draft_vocabulary < self.vocabulary:
            shapes |= {
                "lm_head.weight": (self.draft_vocabulary, hidden),
                "d2t": (self.draft_vocabulary,),
                "t2d": (self.vocabulary,),
            }
        return shapes


@dataclass(frozen=True)
class Head:
    """A head on disk."""

    path: str
    shape: HeadShape
    parameters: int  # Number of parameters in the files, embeddings included.
    # Values of `BASE_KEYS` in the configuration of the head's policy; may be empty.
    base_model: Mapping[str, Any]


def default_layers(layers: int) -> tuple[int, int, int]:
    """Return the layers after which vLLM takes hidden states by default.

    If the policy has fewer than seven layers, vLLM's default contains a layer twice or is not in
    ascending order. Then three adjacent layers are returned.

    Raises:
        ConfigError: The policy has fewer than three layers.
    """
    if layers < 3:
        raise ConfigError("num_hidden_layers", layers, "must be at least 3 for an EAGLE-3 head")
    if layers < 7:
        first = min(2, layers - 3)
        return first, first + 1, first + 2
    return 2, layers // 2, layers - 3


def read_head(folder: str | Path, field: str = "head") -> Head:
    """Read a head's configuration and the shapes of its weights.

    Raises:
        ConfigError: The folder does not exist, contains another kind of drafter, or contains
            weights whose shapes differ from its configuration.
    """
    folder = Path(folder)
    config = read_json(folder / CONFIG, field, str(folder))
    shape = _read_shape(f"{field}: {folder / CONFIG}", config)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(field, str(folder), "must hold weights as *.safetensors")
    tensors: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            tensors |= tensor_shapes(file)
        except ValueError as error:
            raise ConfigError(field, str(folder), str(error)) from None
    named = {vllm_name(name): dims for name, dims in tensors.items()}
    for name, expected in shape.weights.items():
        if name == "t2d" and name not in named:  # vLLM does not read t2d
            continue
        if (found := named.get(name)) != expected:
            raise ConfigError(f"{field}: {folder}: {name}", found, f"must have shape {expected}")
    training = folder / TRAINING
    base = read_json(training, field, str(folder)).get("base_model") if training.exists() else None
    return Head(
        path=str(folder),
        shape=shape,
        parameters=sum(map(prod, tensors.values())),
        base_model=base if isinstance(base, dict) else {},
    )


def is_fresh(folder: Path) -> bool:
    """Return whether the folder has a head that this package made and has never trained."""
    record = folder / TRAINING
    return record.exists() and read_object(record).get("updates") == 0


def check_belongs(head: Head, model_config: Mapping[str, Any], field: str = "head") -> None:
    """Refuse a head that does not fit the policy that `model_config` describes.

    Raises:
        ConfigError: Sizes differ, or the head reads hidden states of layers that do not exist.
    """
    made_for = {
        "hidden_size": head.shape.aux_hidden_size,
        "vocab_size": head.shape.vocabulary,
        **head.base_model,
    }
    for key, value in made_for.items():
        found = model_config.get(key, value)
        if found != value:
            allowed = f"made for a model with {key} = {value}, not {found}"
            raise ConfigError(field, head.path, allowed)
    layers = model_config.get("num_hidden_layers")
    if layers is not None and max(head.shape.target_layers, default=0) > layers:
        chosen = list(head.shape.target_layers)
        allowed = f"takes hidden states of layers {chosen}, the model has {layers}"
        raise ConfigError(field, head.path, allowed)


def shape_for(
    model_config: Mapping[str, Any],
    target_layers: tuple[int, ...],
    draft_vocabulary: int | None,
    place: str = "model",
) -> HeadShape:
    """Return the sizes of a head with one llama layer that is as wide as the policy."""
    sizes = _sizes(place, model_config)
    return HeadShape(
        architecture=LLAMA,
        **sizes,
        draft_vocabulary=_draft_vocabulary(place, draft_vocabulary, sizes["vocabulary"]),
        target_layers=target_layers,
        aux_hidden_size=sizes["hidden_size"],
    )


def _read_shape(place: str, config: Mapping[str, Any]) -> HeadShape:
    kind = config.get("speculators_model_type")
    if kind is None:
        layer, names = config, config.get("architectures") or []
        if not {LLAMA, "LlamaForCausalLMEagle3"}.intersection(names):
            allowed = f"must be LlamaForCausalLMEagle3 or {LLAMA}, or a head of speculators"
            raise ConfigError(f"{place}: architectures", names, allowed)
        architecture = LLAMA
    else:
        layer = config.get("transformer_layer_config") or {}
        layer_kind = layer.get("model_type", "llama")
        if kind != "eagle3":
            raise ConfigError(f"{place}: speculators_model_type", kind, "must be 'eagle3'")
        if "model_type" in config:
            allowed = "must be absent beside speculators_model_type: vLLM would load a whole model"
            raise ConfigError(f"{place}: model_type", config["model_type"], allowed)
        if layer_kind not in _ARCHITECTURES:
            raise ConfigError(f"{place}: model_type", layer_kind, "must be 'llama' or 'qwen3'")
        architecture = _ARCHITECTURES[layer_kind]
    if _size(place, layer, "num_hidden_layers", 1) != 1:
        raise ConfigError(f"{place}: num_hidden_layers", layer["num_hidden_layers"], "must be 1")
    key = "eagle_aux_hidden_state_layer_ids"
    layers = config.get(key) or (config.get("eagle_config") or {}).get(key) or []
    if not isinstance(layers, list) or not all(type(i) is int and i >= 0 for i in layers):
        raise ConfigError(f"{place}: {key}", layers, "must be a list of layers")
    sizes = _sizes(place, layer)
    drafted = config.get("draft_vocab_size")
    return HeadShape(
        architecture=architecture,
        **sizes,
        draft_vocabulary=_draft_vocabulary(place, drafted, sizes["vocabulary"]),
        target_layers=tuple(layers),
        aux_hidden_size=_size(place, config, "target_hidden_size", sizes["hidden_size"]),
        # If this key is missing, vLLM assumes true in the format of speculators, else false.
        norm_before_residual=bool(config.get("norm_before_residual", kind is not None)),
    )


def _sizes(place: str, layer: Mapping[str, Any]) -> dict[str, Any]:
    # Older files have `rope_theta` at the top level.
    theta = (layer.get("rope_parameters") or {}).get("rope_theta", layer.get("rope_theta"))
    hidden, heads = (_size(place, layer, key) for key in ("hidden_size", "num_attention_heads"))
    return {
        "hidden_size": hidden,
        "intermediate_size": _size(place, layer, "intermediate_size"),
        "heads": heads,
        "kv_heads": _size(place, layer, "num_key_value_heads", heads),
        "head_dim": _size(place, layer, "head_dim", hidden // heads),
        "vocabulary": _size(place, layer, "vocab_size"),
        "rope_theta": float(theta or 10000.0),
        "rms_norm_eps": float(layer.get("rms_norm_eps") or 1e-6),
    }


def _size(place: str, config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if type(value) is not int or value < 1:
        raise ConfigError(f"{place}: {key}", value, "must be an integer of at least 1")
    return value


def _draft_vocabulary(place: str, value: Any, vocabulary: int) -> int:
    value = vocabulary if value is None else value
    if type(value) is not int or not 1 <= value <= vocabulary:
        raise ConfigError(f"{place}: draft_vocab_size", value, f"must be 1..{vocabulary}")
    return value


def read_json(path: Path, field: str, value: str) -> dict[str, Any]:
    """Read a JSON object. If that fails, raise a `ConfigError` that names `field` and `value`."""
    try:
        return read_object(path)
    except OSError as error:
        reason = f"must be a folder with {path.name}: {error.strerror}"
    except ValueError as error:
        reason = str(error)
    raise ConfigError(field, value, reason)


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Read the shapes of all tensors from the header of a safetensors file.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is truncated or of another kind, such as a pointer of git-lfs.
    """
    try:
        with safe_open(file, "numpy") as opened:
            names = opened.offset_keys()
            return {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{file} is no complete safetensors file: {error}") from None


def vllm_name(name: str) -> str:
    """Return vLLM's name of a weight; `name` is the weight's name in either format of heads."""
    return name.replace("midlayer.", "layers.0.")
