"""Estimates the memory of one device in both phases of a step, rollout and training.

The formulas have two sources. One is cann-recipes-train's document on Qwen3-235B
(docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md, sections 2.1 and 3.1). Tests compare
the estimates with the document's numbers. The other source is ZeRO (arXiv 1910.02054, section 3.1).
Activations, graphs and fragmentation are not counted.
"""

import dataclasses
import math

from sam_rollout.sizing.parallelism import EngineLimits, RolloutLayout, TrainingLayout
from sam_rollout.sizing.shape import HardwareConfig, ModelShape

GIB = 1 << 30
BF16, FP32 = 2, 4
# Verification holds three float32 arrays: logits, probabilities and a temporary array.
FLOAT_COPIES = 3
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
KV_CACHE = "KV cache, at most"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device, in bytes."""

    training: dict[str, float]  # Training states on the device while the actor is updated.
    # What fills the engine's share of the device during the rollout; the last item is the KV cache.
    rollout: dict[str, float]
    resident: float  # Training states that stay on the device during the rollout.
    offloaded: float  # Training states of this device that are kept in host memory.
    verification: float  # Additional memory of verification, compared with plain sampling.
    outside_share: float  # The device's memory that neither the engine nor `resident` takes.
    kv_tokens: int  # Number of tokens in the KV cache.

    def errors(self, memory_gib: int, max_model_len: int) -> list[str]:
        """Return a sentence for each part that does not fit."""
        cache, states = self.rollout[KV_CACHE], math.fsum(self.training.values()) / GIB
        needed = (math.fsum(self.rollout.values()) - cache) / GIB
        rules = {
            f"the rollout needs {needed:.1f} GiB before the first token is cached, more than its "
            "share of the device: spread the weights over more devices "
            "(tensor_model_parallel_size, expert_parallel_size)": cache <= 0,
            f"the KV cache holds {self.kv_tokens} tokens, less than one text of max_model_len = "
            f"{max_model_len}": cache > 0 and self.kv_tokens < max_model_len,
            "the engine's share and the training states that stay on the device exceed it by "
            f"{-self.outside_share / GIB:.1f} GiB: offload them, or lower gpu_memory_utilization":
            self.outside_share < 0,
            f"parameters, gradients and optimizer states need {states:.1f} GiB of {memory_gib} GiB":
            states > memory_gib,
        }  # fmt: skip
        return [text for text, wrong in rules.items() if wrong]

    @property
    def warning(self) -> str:
        """A sentence if verification may not fit into memory, else an empty text."""
        if self.verification <= max(0, self.outside_share):
            return ""
        return (
            f"verifying drafts may need {self.verification / GIB:.1f} GiB beyond the engine's "
            f"share, with {self.outside_share / GIB:.1f} GiB left: lower sam.max_draft_tokens or "
            "gpu_memory_utilization, sam.gate.threshold if the gate uses it, or max_num_seqs if "
            "steps are padded (sam.pad_drafts)"
        )


def training_states(shape: ModelShape, layout: TrainingLayout) -> dict[str, float]:
    """Return the fullest rank's bytes of training states, summed over its device and host."""
    if layout.engine == "fsdp":
        # verl keeps FSDP's shards in float32, so the optimizer needs no additional float32 copy.
        shard = FP32 * shape.parameters / layout.shards
        return {PARAMETERS: shard, GRADIENTS: shard, OPTIMIZER: 2 * shard}
    layers = max(layout.stage_layers)
    dense = (shape.attention_parameters + shape.mlp_parameters) // layout.tensor
    dense = layers * (dense + shape.router_parameters)
    dense += shape.embedding_parameters // layout.tensor // min(2, layout.pipeline)
    expert_ranks = layout.expert * layout.expert_tensor
    experts = layers * (shape.experts * shape.expert_parameters // expert_ranks)
    ranks = layout.devices // layout.pipeline
    states = dense / (ranks // layout.tensor) + experts / max(1, ranks // expert_ranks)
    total = dense + experts
    return {PARAMETERS: BF16 * total, GRADIENTS: FP32 * total, OPTIMIZER: 3 * FP32 * states}


def rollout_weights(shape: ModelShape, layout: RolloutLayout) -> float:
    """Return the bytes of one rollout rank's weights in bfloat16.

    Every rank has all routers. If `layout.expert` > 1, whole experts are spread over this number of
    ranks. Otherwise each expert is divided among the tensor parallel ranks.
    """
    dense = shape.embedding_parameters
    dense += shape.layers * (shape.attention_parameters + shape.mlp_parameters)
    experts = shape.layers * shape.experts * shape.expert_parameters
    spread = layout.expert if layout.expert > 1 else layout.tensor
    routers = shape.layers * shape.router_parameters
    return BF16 * (dense / layout.tensor + experts / spread + routers)


def sampling_bytes(shape: ModelShape, rows: int) -> float:
    """Return the bytes that each rank needs for sampling; `rows` is the number of logits rows."""
    return rows * shape.vocab * (BF16 + FLOAT_COPIES * FP32)


def plan_memory(
    shape: ModelShape,
    training: TrainingLayout,
    rollout: RolloutLayout,
    hardware: HardwareConfig,
    limits: EngineLimits,
) -> MemoryPlan:
    """Estimate a device's memory in both phases of a step."""
    states = training_states(shape, training)
    away = set()
    if training.offload_parameters:
        away |= {PARAMETERS, GRADIENTS}
    if training.offload_optimizer or training.swap_optimizer:
        away.add(OPTIMIZER)
    # vLLM measures the items below and activations. The KV cache gets the rest of vLLM's share.
    items = {
        "weights": rollout_weights(shape, rollout),
        "weights of the drafting model": limits.drafter.weights,
        "sampling without drafts": sampling_bytes(shape, limits.max_num_seqs),
        "states of linear attention": limits.max_num_seqs * shape.state_bytes(rollout.tensor),
        "driver and communication": hardware.runtime_gib * GIB,
    }
    share = limits.memory_fraction * hardware.memory_gib * GIB
    left = hardware.kv_cache_gib * GIB or share - math.fsum(items.values())
    items = {name: size for name, size in items.items() if size} | {KV_CACHE: left}
    # With drafts a request has k + 1 rows of logits; without drafts it has one row.
    verified = min(limits.verified_requests, limits.max_num_seqs)
    more_rows = max(0, verified * (limits.draft_tokens + 1) - limits.max_num_seqs)
    resident = math.fsum(size for name, size in states.items() if name not in away)
    token_bytes = shape.kv_cache_bytes(rollout.tensor) + limits.drafter.kv_bytes
    return MemoryPlan(
        training={n: s for n, s in states.items() if n != OPTIMIZER or not training.swap_optimizer},
        rollout=items,
        resident=resident,
        offloaded=math.fsum(size for name, size in states.items() if name in away - {GRADIENTS}),
        verification=sampling_bytes(shape, more_rows),
        outside_share=hardware.memory_gib * GIB - math.fsum(items.values()) - resident,
        kv_tokens=max(0, int(left // token_bytes)),
    )
