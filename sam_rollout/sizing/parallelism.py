"""How training and rollout divide a model among devices, and what one engine may hold."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class TrainingLayout:
    """One training engine on all devices of the run.

    Attributes:
        engine: `fsdp` (parameters sharded over `shards` ranks) or `megatron`.
        devices: all of the run.
        tensor, pipeline, context: Megatron's parallel sizes.
        expert, expert_tensor: Megatron's parallel sizes of the experts.
        sequence: Ulysses sequence parallel size (FSDP).
        shards: ranks that one copy of the parameters is sharded over (FSDP).
        stage_layers: layers of each pipeline stage.
        offload_parameters, offload_optimizer: to the host while they are not used.
        swap_optimizer: optimizer states are on the host at all times (MindSpeed).
    """

    engine: str
    devices: int
    stage_layers: tuple[int, ...]
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    sequence: int = 1
    shards: int = 1
    offload_parameters: bool = False
    offload_optimizer: bool = False
    swap_optimizer: bool = False

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
    """The engines of the rollout, alike and side by side.

    Attributes:
        devices: all of the run.
        tensor: devices that divide attention, and dense layers.
        data: engines behind one server; they share experts, nothing else.
        expert: devices that a layer's experts are spread over whole; 1: experts are cut like dense
            layers, over `tensor` devices.
    """

    devices: int
    tensor: int = 1
    data: int = 1
    expert: int = 1

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
    """What a model that drafts takes of one device; nothing without one.

    Attributes:
        weights: bytes.
        kv_bytes: keys and values of one token, bytes.
    """

    weights: float = 0.0
    kv_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class EngineLimits:
    """What one engine may hold and score at once.

    Attributes:
        memory_fraction: share of the device that the engine takes (`gpu_memory_utilization`).
        max_num_seqs: requests at once.
        max_model_len: longest text, tokens.
        draft_tokens: k; 0 without speculation.
        verified_requests: most requests with k draft tokens in a step: as many as the gate lets
            draft, or as are filled up to k (`sam.pad_drafts`).
        drafter: a model that drafts beside the policy.
    """

    memory_fraction: float
    max_num_seqs: int
    max_model_len: int
    draft_tokens: int
    verified_requests: int
    drafter: DrafterSize = DrafterSize()
