"""How training and rollout divide a model among devices, and what one engine may hold."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainingLayout:
    """One training engine on all devices of the run."""

    engine: str  # fsdp or megatron
    devices: int
    stage_layers: tuple[int, ...]  # layers of each pipeline stage
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: int = 1  # Ulysses sequence parallel size (FSDP)
    shards: int = 1  # ranks that one copy of the parameters is sharded over (FSDP)
    offload_parameters: bool = False  # to the host while they are not used
    offload_optimizer: bool = False
    swap_optimizer: bool = False  # optimizer states are on the host at all times (MindSpeed)

    @property
    def model_parallel(self) -> int:
        """Devices that work on the same responses."""
        if self.engine == "fsdp":
            return self.sequence
        return self.tensor * self.pipeline * self.context

    @property
    def data_parallel(self) -> int:
        """Groups of devices that work on different responses."""
        return self.devices // self.model_parallel


@dataclasses.dataclass(frozen=True)
class RolloutLayout:
    """The engines of the rollout, alike and side by side."""

    devices: int
    tensor: int = 1  # devices that divide attention, and dense layers
    data: int = 1  # engines behind one server; they share experts, nothing else
    expert: int = 1  # devices that experts are spread over whole; 1: cut like dense layers

    @property
    def replicas(self) -> int:
        """Servers, each with its own copy of the model."""
        return self.devices // (self.tensor * self.data)

    @property
    def engines(self) -> int:
        """Schedulers, each with its own requests and KV cache."""
        return self.replicas * self.data


@dataclasses.dataclass(frozen=True)
class DrafterSize:
    """What a model that drafts takes of one device; nothing without one."""

    weights: float = 0.0  # bytes
    kv_bytes: float = 0.0  # keys and values of one token


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What one engine may hold and score at once."""

    memory_fraction: float  # of the device that the engine takes (`gpu_memory_utilization`)
    max_num_seqs: int
    draft_tokens: int  # k; 0 without speculation
    verified_requests: int  # most with k draft tokens in a step: the gate's, or what is filled up
    drafter: DrafterSize = DrafterSize()
