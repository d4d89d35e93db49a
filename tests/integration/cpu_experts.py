"""Lets several engines of vLLM 0.31 share a mixture of experts on a CPU, for tests.

vLLM's communicator for CPUs lacks ``all_gatherv`` and ``reduce_scatterv``, and its experts for CPUs
ignore ``expert_map``.
"""

import functools
import inspect
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def add_missing_parts() -> None:
    """Patch vLLM in this process; a second call does no harm."""
    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv
    if not hasattr(CPUUnquantizedExperts.apply, "__wrapped__"):
        CPUUnquantizedExperts.apply = _on_own_experts(CPUUnquantizedExperts.apply)


def all_gatherv(
    self: CpuCommunicator,
    input_: torch.Tensor | list[torch.Tensor],
    dim: int = 0,
    sizes: list[int] | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """Concatenate the ranks' tensors; the tensor of rank i has `sizes[i]` rows."""
    if isinstance(input_, list):
        return [all_gatherv(self, tensor, dim, sizes) for tensor in input_]
    assert dim == 0
    sizes = sizes or [len(input_)] * self.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: len(input_)] = input_
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatterv(
    self: CpuCommunicator, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
) -> torch.Tensor:
    """Sum the ranks' tensors; return this rank's rows. Rank i gets `sizes[i]` rows."""
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    total = input_.contiguous().clone()
    dist.all_reduce(total, group=self.device_group)
    return total.split(sizes)[self.rank_in_group].clone()


def _on_own_experts(original: Any) -> Any:
    given = inspect.signature(original)

    @functools.wraps(original)
    def apply(*args: Any, **kwargs: Any) -> None:
        call = given.bind(*args, **kwargs)
        values = call.arguments
        if values["expert_map"] is not None:
            own = values["expert_map"][values["topk_ids"].long()]
            values["topk_weights"] = values["topk_weights"] * (own >= 0)
            values["topk_ids"] = own.clamp(min=0).to(values["topk_ids"].dtype)
        original(*call.args, **call.kwargs)

    return apply
