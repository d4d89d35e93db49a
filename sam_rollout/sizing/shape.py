"""The shape of a model and of a device, as far as memory depends on them."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from sam_rollout.config import ConfigError, Section, setting

# Keys of a `config.json` with which a decoder is of another kind than Qwen3's.
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
    """Sizes of a Qwen3 decoder; the group `model_shape` of the model files.

    Names and values follow the model's `config.json`: `kv_heads` is `num_key_value_heads`;
    `experts` 0 stands for a dense model. Norms are left out of all counts, less than 0.01 % of the
    parameters.
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
        """Read the sizes of a decoder from its ``config.json``; None where that does not tell them.

        Args:
            config: The file's content. Of a model that reads more than text, its text model counts.
                Kinds that the formulas below do not cover (latent or linear attention, shared
                experts, layers of two kinds) tell nothing.
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
        """Query, key, value and output projections of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """Gate, up and down projection of one layer of a dense model; 0 with experts."""
        return 0 if self.experts else 3 * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """Gate, up and down projection of one expert; 0 for a dense model."""
        return 3 * self.hidden * self.moe_intermediate if self.experts else 0

    @property
    def router_parameters(self) -> int:
        """Router of one layer; 0 for a dense model."""
        return self.hidden * self.experts

    @property
    def embedding_parameters(self) -> int:
        """Vocabulary embedding and output head together."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self._with_experts(self.experts)

    @property
    def active_parameters(self) -> int:
        """Parameters that one token meets."""
        return self._with_experts(self.experts_per_token)

    def _with_experts(self, experts: int) -> int:
        layer = self.attention_parameters + self.mlp_parameters + self.router_parameters
        layer += experts * self.expert_parameters
        return self.layers * layer + self.embedding_parameters

    def kv_cache_bytes(self, tensor_parallel: int = 1) -> int:
        """Keys and values of one token on one rank in bfloat16, all layers, bytes.

        Where a model has fewer heads than there are ranks, each rank keeps one of them: vLLM
        replicates what it cannot divide.
        """
        heads = max(1, self.kv_heads // tensor_parallel)
        return 2 * self.layers * heads * self.head_dim * 2


@dataclasses.dataclass(frozen=True)
class HardwareConfig(Section):
    """One device as verl counts them, a die or a GPU; the group `hardware` of the device files.

    `memory_gib`: all of it. `runtime_gib`: what driver and communication take. `asleep_gib`: what
    the sleeping engine leaves behind while the model is trained. `kv_cache_gib`: size of the KV
    cache where the engine is told one (vLLM on CPUs); 0 where it takes what its share leaves.
    """

    PATH: ClassVar[str] = "hardware"

    device: str = "device"
    memory_gib: int = setting(1, minimum=1)
    runtime_gib: int = setting(0, minimum=0)
    asleep_gib: int = setting(0, minimum=0)
    kv_cache_gib: int = setting(0, minimum=0)
