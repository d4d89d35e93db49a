"""Replaces what vllm-ascend's engine needs from an NPU; the engine's Python code still runs."""

from collections import defaultdict

import torch
import torch_npu

from npu_stand_in import operators

MEMORY_FOR_CACHE = 64 << 20


def compute_slot_mapping(
    num_tokens,
    max_tokens,
    query_start_loc,
    positions,
    block_table,
    stride,
    block_size,
    out,
    **options,
):
    """Compute the cache slot of each scheduled token, like vllm-ascend's Triton kernel."""
    out[num_tokens:max_tokens] = options["PAD_ID"]
    counts = torch.diff(query_start_loc).long()
    requests = torch.arange(len(counts)).repeat_interleave(counts)
    positions = positions[: len(requests)].long()
    blocks = block_table[requests, positions // block_size].long()
    out[: len(requests)] = blocks * block_size + positions % block_size


def prepare():
    """Install the replacements; must be called before the engine is made."""
    for operator in operators.OPERATORS:
        setattr(torch_npu, operator.__name__, operator)
    torch.Tensor.npu = lambda self, *_args, **_kwargs: self
    for name in ("synchronize", "empty_cache"):
        setattr(torch.accelerator, name, lambda *_args, **_kwargs: None)

    from vllm.utils import torch_utils
    from vllm_ascend.platform import NPUPlatform

    register = torch_utils.direct_register_custom_op

    def register_for_cpu(*args, **kwargs):
        return register(*args[:5], **{**kwargs, "dispatch_key": "CPU"})

    torch_utils.direct_register_custom_op = register_for_cpu
    NPUPlatform.device_type, NPUPlatform.dispatch_key = "cpu", "CPU"
    NPUPlatform.dist_backend = "gloo"

    from vllm_ascend.worker import block_table, worker

    # vllm-ascend calls this kernel as kernel[grid](...).
    block_table._compute_slot_mapping_kernel = defaultdict(lambda: compute_slot_mapping)
    initialize = worker.init_distributed_environment

    def initialize_with_gloo(world_size, rank, method, local_rank, _backend=None, *args, **kwargs):
        return initialize(world_size, rank, method, local_rank, "gloo", *args, **kwargs)

    def init_device(self):
        self._init_worker_distributed_environment()
        torch_utils.set_random_seed(self.model_config.seed)
        return torch.device("cpu")

    worker.init_distributed_environment = initialize_with_gloo
    worker.NPUWorker._init_device = init_device
    worker.NPUWorker._warm_up_atb = lambda self: None
    worker.NPUWorker.determine_available_memory = lambda self: MEMORY_FOR_CACHE
