"""Memory of one device in both phases of a step: what is certain on paper, and what that leaves.

Weights, KV cache and training states are counted as in cann-recipes-train's notes on Qwen3-235B
(docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md, sections 2.1 and 3.1), whose figures
the tests repeat, and as in ZeRO (arXiv 1910.02054, section 3.1). Activations, graphs and
fragmentation take some of what is left.
"""

import dataclasses
import math

from sam_rollout.sizing.parallelism import EngineLimits, RolloutLayout, TrainingLayout
from sam_rollout.sizing.shape import HardwareConfig, ModelShape

GIB = 1 << 30
BF16, FP32 = 2, 4
# Of the logits in float32 during verification: themselves, probabilities, one temporary.
FLOAT_COPIES = 3
PARAMETERS, GRADIENTS, OPTIMIZER = "parameters", "gradients", "optimizer states"
KV_CACHE = "KV cache, at most"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device, bytes.

    Attributes:
        training: training states on the device while the actor is updated.
        rollout: items of the engine's share while it generates; the last is the KV cache.
        resident: training states that stay on the device meanwhile.
        offloaded: training states that the device keeps on its host.
        verification: beyond sampling, in a step with `verified_requests`.
        outside_share: of the device, neither the engine's nor taken by `resident`.
        kv_tokens: tokens that the KV cache holds.
        full_texts: texts of full length that it holds.
        errors: what cannot run.
        warnings: what may not.
    """

    training: dict[str, float]
    rollout: dict[str, float]
    resident: float
    offloaded: float
    verification: float
    outside_share: float
    kv_tokens: int
    full_texts: float
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def training_states(shape: ModelShape, layout: TrainingLayout) -> dict[str, float]:
    """Bytes of the fullest rank, wherever they lie."""
    if layout.engine == "fsdp":
        # verl keeps FSDP's shards in float32: they are the optimizer's master copy.
        shard = FP32 * shape.parameters / layout.shards
        return {PARAMETERS: shard, GRADIENTS: shard, OPTIMIZER: 2 * shard}
    layers = max(layout.stage_layers)
    dense = (shape.attention_parameters + shape.mlp_parameters) // layout.tensor
    dense = layers * (dense + shape.router_parameters)
    # Embedding and head lie on the first and the last stage; with one stage on the same.
    dense += shape.embedding_parameters // layout.tensor // min(2, layout.pipeline)
    expert_ranks = layout.expert * layout.expert_tensor
    experts = layers * (shape.experts * shape.expert_parameters // expert_ranks)
    # The distributed optimizer shards its states over the ranks that hold the same parameters:
    # data and context parallel ones outside of experts, fewer for experts.
    ranks = layout.devices // layout.pipeline
    states = dense / (ranks // layout.tensor) + experts / max(1, ranks // expert_ranks)
    total = dense + experts
    return {PARAMETERS: BF16 * total, GRADIENTS: FP32 * total, OPTIMIZER: 3 * FP32 * states}


def rollout_weights(shape: ModelShape, layout: RolloutLayout) -> float:
    """Bytes of the weights of one rollout rank in bfloat16.

    Embedding and head are divided by vocabulary; routers are on every rank; experts lie whole on
    `layout.expert` ranks, or are cut over the tensor parallel ones.
    """
    dense = shape.embedding_parameters
    dense += shape.layers * (shape.attention_parameters + shape.mlp_parameters)
    experts = shape.layers * shape.experts * shape.expert_parameters
    spread = layout.expert if layout.expert > 1 else layout.tensor
    routers = shape.layers * shape.router_parameters
    return BF16 * (dense / layout.tensor + experts / spread + routers)


def sampling_bytes(shape: ModelShape, rows: int) -> float:
    """Bytes that drawing tokens for `rows` positions takes on every rank.

    vLLM gathers the whole vocabulary on each tensor parallel rank, in the model's type, and samples
    in float32.
    """
    return rows * shape.vocab * (BF16 + FLOAT_COPIES * FP32)


def plan_memory(
    shape: ModelShape,
    training: TrainingLayout,
    rollout: RolloutLayout,
    hardware: HardwareConfig,
    limits: EngineLimits,
) -> MemoryPlan:
    """Count both phases of a step and judge them."""
    states = training_states(shape, training)
    stays = {
        PARAMETERS: not training.offload_parameters,
        GRADIENTS: not training.offload_parameters,
        OPTIMIZER: not (training.offload_optimizer or training.swap_optimizer),
    }
    resident = math.fsum(size for name, size in states.items() if stays[name])
    # Gradients are dropped, not offloaded.
    offloaded = math.fsum(
        size for name, size in states.items() if not stays[name] and name != GRADIENTS
    )
    if training.swap_optimizer:
        del states[OPTIMIZER]
    # What vLLM measures before it gives the rest of its share to the KV cache, without activations.
    items = {
        "weights": rollout_weights(shape, rollout),
        "weights of the model that drafts": limits.drafter.weights,
        "sampling without drafts": sampling_bytes(shape, limits.max_num_seqs),
        "driver and communication": hardware.runtime_gib * GIB,
    }
    share = limits.memory_fraction * hardware.memory_gib * GIB
    left = hardware.kv_cache_gib * GIB or share - math.fsum(items.values())
    items = {name: size for name, size in items.items() if size} | {KV_CACHE: left}
    of_token = shape.kv_cache_bytes(rollout.tensor) + limits.drafter.kv_bytes
    kv_tokens = max(0, int(left // of_token))
    # A request with drafts has k + 1 rows of logits, any other one.
    verified = min(limits.verified_requests, limits.max_num_seqs)
    more_rows = max(0, verified * (limits.draft_tokens + 1) - limits.max_num_seqs)
    plan = MemoryPlan(
        training=states,
        rollout=items,
        resident=resident,
        offloaded=offloaded,
        verification=sampling_bytes(shape, more_rows),
        outside_share=hardware.memory_gib * GIB - math.fsum(items.values()) - resident,
        kv_tokens=kv_tokens,
        full_texts=kv_tokens / limits.max_model_len,
        errors=(),
        warnings=(),
    )
    errors, warnings = _errors(plan, hardware, limits), _warnings(plan)
    return dataclasses.replace(plan, errors=tuple(errors), warnings=tuple(warnings))


def _errors(plan: MemoryPlan, hardware: HardwareConfig, limits: EngineLimits) -> list[str]:
    found = []
    if plan.rollout[KV_CACHE] <= 0:
        needed = math.fsum(plan.rollout.values()) - plan.rollout[KV_CACHE]
        found.append(
            f"the rollout needs {needed / GIB:.1f} GiB before the first token is cached, more than "
            f"its share of the device: spread the weights over more devices "
            "(tensor_model_parallel_size, expert_parallel_size)"
        )
    elif plan.full_texts < 1:
        found.append(
            f"the KV cache holds {plan.kv_tokens} tokens, less than one text of "
            f"max_model_len = {limits.max_model_len}"
        )
    if plan.outside_share < 0:
        found.append(
            f"the engine's share and the training states that stay on the device exceed it by "
            f"{-plan.outside_share / GIB:.1f} GiB: offload them, or lower gpu_memory_utilization"
        )
    states = math.fsum(plan.training.values()) / GIB
    if states > hardware.memory_gib:
        found.append(
            f"parameters, gradients and optimizer states need {states:.1f} GiB of "
            f"{hardware.memory_gib} GiB"
        )
    return found


def _warnings(plan: MemoryPlan) -> list[str]:
    if plan.verification <= max(0, plan.outside_share):
        return []
    return [
        f"verifying drafts may need {plan.verification / GIB:.1f} GiB beyond the engine's "
        f"share, with {plan.outside_share / GIB:.1f} GiB left: lower "
        "sam.max_draft_tokens or gpu_memory_utilization, sam.gate.threshold where it decides, "
        "or max_num_seqs where steps are filled up (sam.pad_drafts)"
    ]
