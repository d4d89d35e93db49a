"""The sizes of a model and of a device on which memory depends."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from sam_rollout.config import ConfigError, Section, setting

# Keys in the `config.json` of decoders of another kind than Qwen3's.
_NOT_COVERED = (
    "kv_lora_rank",
    "n_routed_experts",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "linear_num_value_heads",
)


@dataclasses.dataclass(frozen=True)
class ModelShape(Section):
    """The sizes of a Qwen3 decoder; the group `model_shape` of configs/model.

    Names and values follow the model's `config.json`: `kv_heads` is `num_key_value_heads`. A dense
    model has 0 `experts`. Norms are not counted; they have less than 0.01 % of the parameters.
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
    vocab: int = setting(1, minimum=1)
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = "a mixture of experts" if self.experts else "a dense model"
        needed = ("experts_per_token", "moe_intermediate") if self.experts else ("intermediate",)
        most = f"must be at most {self.PATH}.experts = {self.experts}"
        for name, right, allowed in (
            ("heads", self.heads % self.kv_heads == 0, "must be a multiple of kv_heads"),
            *((n, getattr(self, n) > 0, f"must be at least 1 for {kind}") for n in needed),
            ("experts_per_token", self.experts_per_token <= self.experts, most),
        ):
            if not right:
                raise ConfigError(f"{self.PATH}.{name}", getattr(self, name), allowed)

    @classmethod
    def of_model(cls, config: Mapping[str, Any]) -> Self | None:
        """Read the sizes of a decoder from its ``config.json``.

        Args:
            config: The file's content. For a model that reads more than text, the sizes are those
                of its text model.

        Returns:
            The sizes; None if the file lacks them, or if the formulas below do not cover the model
            (latent or linear attention, shared experts, layers of two kinds).
        """
        text = {**config, **(config.get("text_config") or {})}
        if any(text.get(name) for name in _NOT_COVERED):
            return None
        experts = text.get("num_experts") or text.get("num_local_experts") or 0
        try:
            heads = text["num_attention_heads"]
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
                vocab=text["vocab_size"],
                tied_embeddings=bool(config.get("tie_word_embeddings")),
            )
        except (KeyError, TypeError, ConfigError):
            return None

    @property
    def attention_parameters(self) -> int:
        """Parameters of the query, key, value and output projections of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one dense layer's gate, up and down projections; 0 with experts."""
        return 0 if self.experts else 3 * self.hidden * self.intermediate

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
        """Return the bytes of one token's keys and values on one rank, in bfloat16, for all layers.

        With fewer key/value heads than ranks, vLLM replicates heads, and each rank keeps one.
        """
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads * self.head_dim * 2


@dataclasses.dataclass(frozen=True)
class HardwareConfig(Section):
    """One device as verl counts them (a die or a GPU); the group `hardware` of configs/device."""

    PATH: ClassVar[str] = "hardware"

    device: str = "device"
    memory_gib: int = setting(1, minimum=1)
    runtime_gib: int = setting(0, minimum=0)  # memory of driver and communication
    asleep_gib: int = setting(0, minimum=0)  # memory that a sleeping engine keeps during training
    # Size of the KV cache if it is configured (vLLM on CPUs); 0 if the cache gets the rest of the
    # engine's share.
    kv_cache_gib: int = setting(0, minimum=0)
