"""Exchanges gate reports between engines that share experts, in messages that vLLM sends anyway.

Before each forward pass vLLM's data-parallel ranks sum a small tensor by an `all_reduce`. It has
the shape [fields, ranks], and each rank fills one column. Our reports are further rows of that
tensor. A separate collective could hang, because one rank might call it more often than another.

We replace ``dist.all_reduce`` in the module that sums the tensor (``coordinate_batch_across_dp``;
in vllm-ascend ``NPUModelRunner._sync_metadata_across_dp``). Every rank does so before its first
step. We checked the source of vLLM 0.11 to 0.28 and of vllm-ascend 0.23.
"""

import sys
from typing import Any

import numpy as np
import torch

from sam_rollout.gating.agreement import IDLE, Report

# Modules that sum the tensor. The first of them that is loaded belongs to the runner in use.
SYNC_MODULES = ("vllm_ascend.worker.model_runner_v1", "vllm.v1.worker.dp_utils")
_LARGEST = torch.iinfo(torch.int32).max


def steps_in_lockstep(vllm_config: Any) -> bool:
    """Whether other engines wait for each step of this engine, because they share experts."""
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size == 1:
        return False
    return parallel.enable_expert_parallel or bool(vllm_config.model_config.is_moe)


class DpExchange:
    """Takes the place of ``torch.distributed`` in the module that sums the tensor."""

    def __init__(self, rank: int, ranks: int, dist: Any = torch.distributed) -> None:
        self.dist = dist
        self.ranks = ranks
        self._rank = rank
        self._report = IDLE
        self._received = torch.zeros(len(Report._fields), ranks, dtype=torch.int32)
        self._exchanges = 0

    def publish(self, report: Report) -> None:
        """Send a report with the next exchange.

        Each report is sent once. If an engine has no new report, it counts as idle.
        """
        self._report = Report(*(min(int(value), _LARGEST) for value in report))

    def received(self) -> tuple[int, np.ndarray]:
        """Return the number of exchanges and the last reports, int32 [ranks, fields]."""
        return self._exchanges, self._received.cpu().numpy().T

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Sum a tensor over the ranks.

        If it is a step's tensor, int32 [fields, ranks], the reports are summed in the same call.
        """
        if args or kwargs.keys() != {"group"} or not self._is_of_a_step(tensor):
            return self.dist.all_reduce(tensor, *args, **kwargs)
        reports = torch.zeros(len(Report._fields), self.ranks, dtype=torch.int32)
        reports[:, self._rank] = torch.tensor(self._report, dtype=torch.int32)
        self._report = IDLE
        fields = len(tensor)
        both = torch.cat([tensor, reports.to(tensor.device, non_blocking=True)])
        self.dist.all_reduce(both, **kwargs)
        tensor.copy_(both[:fields])
        self._received = both[fields:]  # stays on the device: a copy to the host would wait
        self._exchanges += 1
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dist, name)

    def _is_of_a_step(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.int32 and tensor.dim() == 2 and tensor.shape[1] == self.ranks


def join_group(parallel_config: Any) -> DpExchange:
    """Make the exchange between this engine and the engines that share its experts.

    If vLLM sums the tensor in another module, no reports arrive, and ``AgreedGate`` notices this.
    """
    rank, ranks = parallel_config.data_parallel_rank, parallel_config.data_parallel_size
    for name in SYNC_MODULES:
        module: Any = sys.modules.get(name)
        if hasattr(module, "dist"):
            before = module.dist.dist if isinstance(module.dist, DpExchange) else module.dist
            module.dist = exchange = DpExchange(rank, ranks, before)
            return exchange
    return DpExchange(rank, ranks)
