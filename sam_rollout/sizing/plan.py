"""Whether a setup fits a device, and by how much."""

import dataclasses
import math

from sam_rollout.sizing.memory import (
    GIB,
    resident_training_bytes,
    rollout_memory,
    sampling_bytes,
    training_memory,
)
from sam_rollout.sizing.parallelism import EngineLimits, RolloutLayout, TrainingLayout
from sam_rollout.sizing.shape import HardwareConfig, ModelShape

KV_CACHE = "KV cache"


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Memory of one device in both phases of a step, bytes.

    Attributes:
        training: items while the actor is updated.
        rollout: items of the engine's share while it generates; the last is the KV cache.
        resident: training states that stay on the device meanwhile.
        verification: beyond sampling, in a step with `verified_requests`.
        verification_ungated: the same if all requests drafted.
        outside_share: of the device, neither the engine's nor taken by `resident`.
        kv_tokens: tokens that the KV cache holds.
        full_texts: texts of full length that it holds.
        errors, warnings: what will not run, and what may not.
    """

    training: dict[str, float]
    rollout: dict[str, float]
    resident: float
    verification: float
    verification_ungated: float
    outside_share: float
    kv_tokens: int
    full_texts: float
    errors: tuple[str, ...]
    warnings: tuple[str, ...]


def plan_memory(
    shape: ModelShape,
    training: TrainingLayout,
    rollout: RolloutLayout,
    hardware: HardwareConfig,
    limits: EngineLimits,
) -> MemoryPlan:
    """Reckon both phases of a step and judge them."""
    update = training_memory(shape, training, hardware)
    generate = rollout_memory(shape, rollout, hardware, limits)
    resident = resident_training_bytes(shape, training)
    memory = hardware.memory_gib * GIB
    share = math.fsum(generate.values())
    token_bytes = shape.kv_cache_bytes(rollout.tensor) + limits.drafter.kv_bytes
    kv_tokens = max(0, int(generate[KV_CACHE] // token_bytes))
    verified = min(limits.verified_requests, limits.max_num_seqs)
    plan = MemoryPlan(
        training=update,
        rollout=generate,
        resident=resident,
        verification=_beyond_sampling(shape, limits, verified),
        verification_ungated=_beyond_sampling(shape, limits, limits.max_num_seqs),
        outside_share=memory - share - resident,
        kv_tokens=kv_tokens,
        full_texts=kv_tokens / limits.max_model_len,
        errors=(),
        warnings=(),
    )
    return dataclasses.replace(
        plan, errors=_errors(plan, memory, limits), warnings=_warnings(plan, memory)
    )


def _beyond_sampling(shape: ModelShape, limits: EngineLimits, verified: int) -> float:
    """Sampling memory of a step with so many verified requests, less what is always taken.

    A request with drafts has k + 1 rows of logits, any other one. The engine sets aside one row a
    request when it measures itself, before it gives the rest of its share to the KV cache.
    """
    rows = limits.max_num_seqs
    if verified:
        # The gate is open, and steps are filled up, only while no more than these run at all.
        rows = verified * (limits.draft_tokens + 1)
    return max(0.0, sampling_bytes(shape, rows) - sampling_bytes(shape, limits.max_num_seqs))


def _errors(plan: MemoryPlan, memory: float, limits: EngineLimits) -> tuple[str, ...]:
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
    static = _static(plan.training)
    if static > memory:
        found.append(
            f"parameters, gradients and optimizer states need {static / GIB:.1f} GiB of "
            f"{memory / GIB:.0f} GiB"
        )
    return tuple(found)


def _static(training: dict[str, float]) -> float:
    states = ("parameters", "gradients", "optimizer")
    return math.fsum(size for name, size in training.items() if name.startswith(states))


def _warnings(plan: MemoryPlan, memory: float) -> tuple[str, ...]:
    found = []
    total = math.fsum(plan.training.values())
    if total > memory >= _static(plan.training):
        found.append(
            f"training may need {total / GIB:.1f} GiB of {memory / GIB:.0f} GiB: lower the tokens "
            "of a micro-batch, or recompute more"
        )
    if plan.verification > plan.outside_share >= 0:
        found.append(
            f"verifying drafts may need {plan.verification / GIB:.1f} GiB beyond the engine's "
            f"share, with {plan.outside_share / GIB:.1f} GiB left: lower "
            "sam.max_draft_tokens or gpu_memory_utilization, sam.gate.threshold where it decides, "
            "or max_num_seqs where steps are filled up (sam.pad_drafts)"
        )
    return tuple(found)
