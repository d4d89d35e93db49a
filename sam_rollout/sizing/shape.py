"""Describes the sizes of a model and of a device, from which a run's memory follows."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from sam_rollout.config import ConfigError, Section, setting

# Models with these keys in `config.json` are of another kind than Qwen3.
_NOT_COVERED = ("kv_lora_rank", "n_routed_experts", "n_shared_experts", "first_k_dense_replace")


@dataclasses.dataclass(frozen=True)
class ModelShape(Section):
    """The sizes of a decoder such as Qwen3 or Qwen3.5; the group `model_shape` of configs/model.

    Values follow the model's `config.json`. In a dense model, `experts` is 0. In a hybrid model,
    some layers have a gated delta net in place of attention; `linear_layers` is their number.
    Norms, convolutions, image encoders and MTP layers are not counted.
    """

    PATH: ClassVar[str] = "model_shape"

    layers: int = setting(1, minimum=1)
    hidden: int = setting(1, minimum=1)
    heads: int = setting(1, minimum=1)
    kv_heads: int = setting(1, minimum=1)
    head_dim: int = setting(1, minimum=1)
    intermediate: int = setting(0, minimum=0)
    experts: int = setting(0, minimum=0)
    experts_per_token: int = setting(0, minimum=0)
    moe_intermediate: int = setting(0, minimum=0)
    shared_intermediate: int = setting(0, minimum=0)
    linear_layers: int = setting(0, minimum=0)
    linear_key_heads: int = setting(0, minimum=0)
    linear_value_heads: int = setting(0, minimum=0)
    linear_head_dim: int = setting(0, minimum=0)
    vocab: int = setting(1, minimum=1)
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = "a mixture of experts" if self.experts else "a dense model"
        needed = ("experts_per_token", "moe_intermediate") if self.experts else ("intermediate",)
        most = f"must be at most {self.PATH}.experts = {self.experts}"
        fewer = f"must be less than {self.PATH}.layers = {self.layers}"
        linear = ("linear_key_heads", "linear_value_heads", "linear_head_dim")
        if self.linear_layers:
            needed, kind = (*needed, *linear), f"{kind} with linear_layers"
        for name, right, allowed in (
            ("heads", self.heads % self.kv_heads == 0, "must be a multiple of kv_heads"),
            *((n, getattr(self, n) > 0, f"must be at least 1 for {kind}") for n in needed),
            ("experts_per_token", self.experts_per_token <= self.experts, most),
            ("linear_layers", self.linear_layers < self.layers, fewer),
        ):
            if not right:
                raise ConfigError(f"{self.PATH}.{name}", getattr(self, name), allowed)

    @classmethod
    def of_model(cls, config: Mapping[str, Any]) -> Self | None:
        """Read sizes from a model's ``config.json``; None if this kind of model is not covered."""
        text = {**config, **(config.get("text_config") or {})}
        if any(text.get(name) for name in _NOT_COVERED):
            return None
        experts = text.get("num_experts") or text.get("num_local_experts") or 0
        try:
            heads = text["num_attention_heads"]
            linear = _linear_layers(text)
            if linear and text["linear_key_head_dim"] != text["linear_value_head_dim"]:
                return None
            return cls(
                layers=text["num_hidden_layers"],
                hidden=text["hidden_size"],
                heads=heads,
                kv_heads=text.get("num_key_value_heads") or heads,
                head_dim=text.get("head_dim") or text["hidden_size"] // heads,
                intermediate=0 if experts else text["intermediate_size"],
                experts=experts,
                experts_per_token=text["num_experts_per_tok"] if experts else 0,
                moe_intermediate=text["moe_intermediate_size"] if experts else 0,
                shared_intermediate=text.get("shared_expert_intermediate_size") or 0,
                linear_layers=linear,
                linear_key_heads=text["linear_num_key_heads"] if linear else 0,
                linear_value_heads=text["linear_num_value_heads"] if linear else 0,
                linear_head_dim=text["linear_key_head_dim"] if linear else 0,
                vocab=text["vocab_size"],
                tied_embeddings=bool(config.get("tie_word_embeddings")),
            )
        except (KeyError, TypeError, ConfigError):
            return None

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention or gated delta net, averaged over all layers."""
        attention = 2 * self.head_dim * (self.heads + self.kv_heads)
        if not self.linear_layers:
            return self.hidden * attention
        attention += self.head_dim * self.heads
        net = self.linear_head_dim * (2 * self.linear_key_heads + 3 * self.linear_value_heads)
        net += 2 * self.linear_value_heads
        both = self.linear_layers * net + (self.layers - self.linear_layers) * attention
        return self.hidden * both // self.layers

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one dense layer's gate, up and down projections.

        In a model with experts, these are the projections of the expert that all tokens share.
        """
        return 3 * self.hidden * (self.shared_intermediate if self.experts else self.intermediate)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert's gate, up and down projections; 0 for a dense model."""
        return 3 * self.hidden * self.moe_intermediate if self.experts else 0

    @property
    def router_parameters(self) -> int:
        """Parameters of one layer's router; 0 for a dense model."""
        return self.hidden * self.experts

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding and the output head together."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self._with_experts(self.experts)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that are used for one token."""
        return self._with_experts(self.experts_per_token)

    def _with_experts(self, experts: int) -> int:
        layer = self.attention_parameters + self.mlp_parameters + self.router_parameters
        layer += experts * self.expert_parameters
        return self.layers * layer + self.embedding_parameters

    def kv_cache_bytes(self, tensor_parallel: int = 1) -> int:
        """Return the bytes of one token's keys and values on one rank, in bfloat16."""
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * (self.layers - self.linear_layers) * heads * self.head_dim * 2

    def state_bytes(self, tensor_parallel: int = 1) -> int:
        """Return the bytes of one request's float32 states on one rank, over all linear layers."""
        heads = max(1, self.linear_value_heads // tensor_parallel)
        return self.linear_layers * heads * self.linear_head_dim**2 * 4


def _linear_layers(text: Mapping[str, Any]) -> int:
    """Count the layers with linear attention.

    Raises:
        KeyError: The model has such layers, but its configuration does not say which.
    """
    kinds = text.get("layer_types")
    if kinds is None:
        if not text.get("linear_num_value_heads"):
            return 0
        # Without a list of types, only every n-th layer has full attention (Qwen3-Next).
        layers, every = text["num_hidden_layers"], text["full_attention_interval"]
        return layers - layers // every
    return kinds.count("linear_attention")


@dataclasses.dataclass(frozen=True)
class HardwareConfig(Section):
    """A device as verl counts devices (a die or a GPU); the group `hardware` of configs/device."""

    PATH: ClassVar[str] = "hardware"

    device: str = "device"
    memory_gib: int = setting(1, minimum=1)
    runtime_gib: int = setting(0, minimum=0)  # Memory of driver and communication.
    asleep_gib: int = setting(0, minimum=0)  # Memory that a sleeping engine keeps during training.
    # Size of the KV cache if it is configured (vLLM on CPUs); 0 if the cache gets the rest of the
    # engine's share.
    kv_cache_gib: int = setting(0, minimum=0)
