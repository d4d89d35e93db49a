"""Exchanges gate reports between engines that share experts, in messages that vLLM sends anyway.

Before each forward pass the data-parallel ranks of vLLM add up a small tensor of shape [fields,
ranks], each rank with numbers in its own column. Ranks without requests take part with a dummy
batch, because the others need their experts. Our reports travel as further rows of that tensor. A
collective of our own could hang: one rank might call it more often than another.

vLLM does this in ``dp_utils.coordinate_batch_across_dp`` (read in 0.11 to 0.28), vllm-ascend in
``NPUModelRunner._sync_metadata_across_dp`` (read in 0.23). Both call ``dist.all_reduce`` of their
module, which all ranks have to wrap before their first step. So they do it when the proposer is
made; whether there is one depends on the engine's configuration alone.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch

from sam_rollout.gating.agreement import IDLE, Report

# Modules that add up the ranks' tensor. The first one that is loaded belongs to the runner in use.
SYNC_MODULES = ("vllm_ascend.worker.model_runner_v1", "vllm.v1.worker.dp_utils")
_LARGEST = torch.iinfo(torch.int32).max


def steps_in_lockstep(vllm_config: Any) -> bool:
    """Whether other engines wait for each step of this engine.

    They wait if experts are spread over data-parallel ranks. Engines of a dense model share
    nothing.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    if parallel is None or parallel.data_parallel_size == 1:
        return False
    return parallel.enable_expert_parallel or bool(vllm_config.model_config.is_moe)


class DpExchange:
    """Exchanges reports between all data-parallel ranks of an engine group, ``ranks`` in number.

    It replaces ``torch.distributed`` in the module that adds up; only ``all_reduce`` is ours.
    """

    def __init__(self, rank: int, ranks: int, dist: Any = torch.distributed) -> None:
        self.dist = dist
        self.ranks = ranks
        self._rank = rank
        self._report = IDLE
        self._received = torch.zeros(len(Report._fields), ranks, dtype=torch.int32)
        self._exchanges = 0

    def publish(self, report: Report) -> None:
        """Send a report with the next exchange only; an engine without a report counts as idle."""
        self._report = Report(*(min(int(value), _LARGEST) for value in report))

    def received(self) -> tuple[int, np.ndarray]:
        """Return the number of exchanges and the last reports, int32 [ranks, fields]."""
        return self._exchanges, self._received.cpu().numpy().T

    def all_reduce(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Replace ``torch.distributed.all_reduce``, and add reports to a step's sum over ranks.

        Only a step's sum, int32 [fields, ranks], is changed.
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
        self._received = both[fields:]  # it stays on the device, so that nothing waits here
        self._exchanges += 1
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dist, name)

    def _is_of_a_step(self, tensor: torch.Tensor) -> bool:
        return tensor.dtype == torch.int32 and tensor.dim() == 2 and tensor.shape[1] == self.ranks


def ride_along(module: Any, rank: int, ranks: int) -> DpExchange:
    """Add reports to the sums over ranks of a module that imports ``torch.distributed as dist``.

    This replaces an earlier exchange of the same module.
    """
    original = module.dist.dist if isinstance(module.dist, DpExchange) else module.dist
    module.dist = exchange = DpExchange(rank, ranks, original)
    return exchange


def join_group(parallel_config: Any) -> DpExchange:
    """Make the exchange between this engine and the engines that share its experts.

    If a vLLM release lets ranks agree on their batches in another way, no report is ever exchanged.
    The gate notices that (``AgreedGate``).
    """
    rank, ranks = parallel_config.data_parallel_rank, parallel_config.data_parallel_size
    for name in SYNC_MODULES:
        module: Any = sys.modules.get(name)
        if hasattr(module, "dist"):
            return ride_along(module, rank, ranks)
    return DpExchange(rank, ranks)
