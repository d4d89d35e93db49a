r"""Memory of one device, in bytes, item by item.

Sources of the formulas: weights, KV cache and static training memory as reckoned for Qwen3-235B in
cann-recipes-train (docs/llm_rl/qwen3_235B_32k_longseq_rl_train_optimization.md, sections 2.1 and
3.1), whose figures the tests repeat; states of mixed precision training as in ZeRO (arXiv
1910.02054, section 3.1); activations per layer as in "Reducing activation recomputation in large
transformer models" (arXiv 2205.05198), counted for grouped-query attention. Fragmentation, CUDA and
NPU graphs, and experts that get more than their share of tokens are not in them.
"""

import dataclasses
import math

from sam_rollout.sizing.parallelism import EngineLimits, RolloutLayout, TrainingLayout
from sam_rollout.sizing.shape import HardwareConfig, ModelShape

GIB = 1 << 30
BF16, FP32 = 2, 4
# Of the logits in float32 during verification: themselves, probabilities, one temporary.
FLOAT_COPIES = 3


def stage_parameters(shape: ModelShape, layout: TrainingLayout, layers: int) -> tuple[int, int]:
    """Parameters of one Megatron rank: (outside of experts, in experts), without embeddings."""
    dense = (shape.attention_parameters + shape.mlp_parameters) // layout.tensor
    dense += shape.router_parameters
    experts = shape.experts * shape.expert_parameters // (layout.expert * layout.expert_tensor)
    return layers * dense, layers * experts


def _training_states(shape: ModelShape, layout: TrainingLayout) -> dict[str, float]:
    """Parameters, gradients and optimizer states of the fullest rank."""
    if layout.engine == "fsdp":
        # verl keeps FSDP's shards in float32: they are the optimizer's master copy.
        shard = shape.parameters / layout.shards
        layer = (shape.parameters - shape.embedding_parameters) / shape.layers
        gathered = BF16 * (layer + shape.vocab * shape.hidden)
        return {
            "parameters (float32 shard)": FP32 * shard,
            "layers gathered for use": gathered,
            "gradients (float32)": FP32 * shard,
            "optimizer states": 2 * FP32 * shard,
        }
    dense, experts = stage_parameters(shape, layout, max(layout.stage_layers))
    # Embedding and head lie on the first and the last stage; with one stage on the same.
    dense += shape.embedding_parameters // layout.tensor // min(2, layout.pipeline)
    total = dense + experts
    # The distributed optimizer shards its states over the ranks that hold the same parameters:
    # data and context parallel ones outside of experts, fewer for experts.
    ranks = layout.devices // layout.pipeline
    dense_copies = ranks // layout.tensor
    expert_copies = max(1, ranks // (layout.expert * layout.expert_tensor))
    states = 3 * FP32 * (dense / dense_copies + experts / expert_copies)
    return {
        "parameters (bfloat16)": BF16 * total,
        "gradients (float32)": FP32 * total,
        "optimizer states and master copy": 0.0 if layout.swap_optimizer else states,
    }


def layer_activations(shape: ModelShape, layout: TrainingLayout) -> float:
    """What one layer keeps for the backward pass of one micro-batch, bytes.

    Without full recomputation: projections, attention output, norms and residual of the attention
    half; of a dense half its input and the gate and up projections; of experts, which MindSpeed's
    `moe_zero_memory` recomputes, input and output.
    """
    tokens, tensor = layout.micro_tokens, layout.tensor
    stream = tokens * shape.hidden * BF16 / tensor  # Megatron's sequence parallelism divides it
    if layout.full_recompute:
        return stream
    head = tokens * shape.head_dim * BF16 / tensor
    projections = head * (shape.heads + 2 * shape.kv_heads) + stream
    attention = head * shape.heads
    norms = 2 * stream + head * (shape.heads + shape.kv_heads)
    kept = projections + attention + norms + stream
    if shape.experts:
        return kept + 2 * stream
    return kept + stream + 2 * tokens * shape.intermediate * BF16 / tensor


def expert_workspace(shape: ModelShape, layout: TrainingLayout) -> float:
    """What one layer's experts need while they work, tokens spread evenly, bytes.

    Dispatched tokens, gate and up projections, their product (of the same width in MindSpeed's
    kernels), combined tokens and the sum. Were all tokens sent to the same experts, it would be
    `experts / experts_per_token` times as much.
    """
    if not shape.experts:
        return 0.0
    tokens = layout.micro_tokens / layout.tensor
    routed = tokens * shape.experts_per_token
    return BF16 * (routed * (shape.hidden + 4 * shape.moe_intermediate) + 2 * tokens * shape.hidden)


def training_memory(
    shape: ModelShape, layout: TrainingLayout, hardware: HardwareConfig
) -> dict[str, float]:
    """Items of the fullest device while the actor is updated, bytes.

    The first pipeline stage keeps activations of as many micro-batches as there are stages (1F1B),
    so of as many layers as the model has.
    """
    items = _training_states(shape, layout)
    kept_layers = layout.pipeline * max(layout.stage_layers)
    items["activations kept for backward"] = kept_layers * layer_activations(shape, layout)
    items["experts at work, evenly used"] = expert_workspace(shape, layout)
    # Logits and their gradient, float32; the vocabulary is divided over tensor parallel ranks.
    logits = layout.micro_tokens * shape.vocab / layout.tensor
    items["logits and their gradient"] = 2 * FP32 * logits
    items["left by the sleeping engine"] = hardware.asleep_gib * GIB
    return {name: size for name, size in items.items() if size}


def resident_training_bytes(shape: ModelShape, layout: TrainingLayout) -> float:
    """Training states that stay on the device while the engine generates, bytes."""
    kept = 0.0
    for name, size in _training_states(shape, layout).items():
        if name.startswith("optimizer"):
            kept += 0 if layout.offload_optimizer else size
        elif not name.startswith("layers") and not layout.offload_parameters:
            kept += size
    return kept


def host_bytes(shape: ModelShape, layout: TrainingLayout) -> float:
    """Training states that one device keeps on its host, bytes; gradients are dropped."""
    kept = 0.0
    for name, size in _training_states(
        shape, dataclasses.replace(layout, swap_optimizer=False)
    ).items():
        if name.startswith("optimizer"):
            kept += size if layout.offload_optimizer or layout.swap_optimizer else 0
        elif name.startswith("parameters") and layout.offload_parameters:
            kept += size
    return kept


def rollout_weights(shape: ModelShape, layout: RolloutLayout) -> dict[str, float]:
    """Weights of one rollout rank in bfloat16, bytes.

    Embedding and head are divided by vocabulary; routers are on every rank; experts lie whole on
    `layout.expert` ranks, or are cut over the tensor parallel ones.
    """
    experts = shape.layers * shape.experts * shape.expert_parameters
    parts = {
        "embeddings": shape.embedding_parameters / layout.tensor,
        "attention": shape.layers * shape.attention_parameters / layout.tensor,
        "dense layers": shape.layers * shape.mlp_parameters / layout.tensor,
        "experts": experts / (layout.expert if layout.expert > 1 else layout.tensor),
        "routers": shape.layers * shape.router_parameters,
    }
    return {name: BF16 * count for name, count in parts.items() if count}


def prefill_activations(shape: ModelShape, layout: RolloutLayout, tokens: int) -> float:
    """Largest working set of one layer on a full batch of prompt tokens, bytes.

    Residual, its norm and the attention's output at full width, and the wider of the layer's halves
    as it lies on one rank; with experts the tokens that one rank dispatches.
    """
    stream = 3 * tokens * shape.hidden
    attention = tokens * shape.head_dim * (shape.heads + 2 * shape.kv_heads) / layout.tensor
    if shape.experts:
        routed = tokens * shape.experts_per_token / layout.tensor
        half = routed * (shape.hidden + 3 * shape.moe_intermediate)
    else:
        half = 3 * tokens * shape.intermediate / layout.tensor
    return BF16 * (stream + max(attention, half))


def sampling_bytes(shape: ModelShape, rows: int) -> float:
    """What drawing tokens for `rows` positions takes on every rank, bytes.

    vLLM gathers the whole vocabulary on each tensor parallel rank, in the model's type, and samples
    in float32.
    """
    return rows * shape.vocab * (BF16 + FLOAT_COPIES * FP32)


def rollout_memory(
    shape: ModelShape, layout: RolloutLayout, hardware: HardwareConfig, limits: EngineLimits
) -> dict[str, float]:
    """Items of one device while the engine generates, bytes; the last is the KV cache.

    vLLM measures what a full batch of prompt tokens and one sampled token for each of max_num_seqs
    requests take, and gives the KV cache what is left of its share of the device. A negative KV
    cache means that the engine does not fit.
    """
    items = {f"weights: {name}": size for name, size in rollout_weights(shape, layout).items()}
    if limits.drafter.weights:
        items["weights: model that drafts"] = limits.drafter.weights
    items["prompt activations"] = prefill_activations(shape, layout, limits.max_num_batched_tokens)
    items["sampling, no drafts"] = sampling_bytes(shape, limits.max_num_seqs)
    items["driver and communication"] = hardware.runtime_gib * GIB
    if hardware.kv_cache_gib:
        items["KV cache"] = hardware.kv_cache_gib * GIB
    else:
        share = limits.memory_fraction * hardware.memory_gib * GIB
        items["KV cache"] = share - math.fsum(items.values())
    return items
