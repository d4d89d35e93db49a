"""Describes an engine's limits, and how training and rollout divide a model among devices."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainingLayout:
    """How training, which uses all devices of the run, divides the model and the batch."""

    engine: str  # fsdp or megatron
    devices: int
    stage_layers: tuple[int, ...]  # layers of each pipeline stage
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: int = 1  # Ulysses sequence parallel size (FSDP).
    shards: int = 1  # Ranks over which one copy of the parameters is sharded (FSDP).
    offload_parameters: bool = False  # Whether parameters are on the host while they are not used.
    offload_optimizer: bool = False
    swap_optimizer: bool = False  # Whether optimizer states stay on the host (MindSpeed).

    @property
    def model_parallel(self) -> int:
        """Number of devices that work on the same responses."""
        if self.engine == "fsdp":
            return self.sequence
        return self.tensor * self.pipeline * self.context

    @property
    def data_parallel(self) -> int:
        """Number of groups of devices that work on different responses."""
        return self.devices // self.model_parallel


@dataclasses.dataclass(frozen=True)
class RolloutLayout:
    """How each engine of the rollout divides the model."""

    devices: int
    tensor: int = 1  # Devices among which attention and dense layers are divided.
    data: int = 1  # Engines per server, which share nothing but the experts.
    expert: int = 1  # Devices among which whole experts are spread; if 1, each expert is divided.

    @property
    def replicas(self) -> int:
        """Number of servers, each with its own copy of the model."""
        return self.devices // (self.tensor * self.data)

    @property
    def engines(self) -> int:
        """Number of schedulers, each with its own requests and KV cache."""
        return self.replicas * self.data


@dataclasses.dataclass(frozen=True)
class DrafterSize:
    """The memory of a draft model on one device; all zero without a draft model."""

    weights: float = 0.0  # Bytes.
    kv_bytes: float = 0.0  # Bytes of one token's keys and values.


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """The limits of one engine."""

    memory_fraction: float  # share of the device's memory (`gpu_memory_utilization`)
    max_num_seqs: int
    draft_tokens: int  # k; 0 without speculation.
    verified_requests: int  # Maximum number of requests with k draft tokens in one step.
    drafter: DrafterSize = DrafterSize()
