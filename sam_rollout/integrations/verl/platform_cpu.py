"""Adds a CPU platform to verl's registry of platforms.

One unit of Ray's ``GPU`` resource stands for one training process, so ``ray.init(num_gpus=N)``
allows N training processes.
"""

import contextlib
import os
import resource
import types
from functools import partial
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

PLATFORM_ENV = "VERL_PLATFORM"


def _free_and_total_bytes(*_args: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Do nothing: a CPU has no caching allocator, streams or device index."""


class _CpuDevice(types.ModuleType):
    memory_allocated = memory_reserved = staticmethod(lambda *_: psutil.Process().memory_info().rss)
    max_memory_allocated = max_memory_reserved = staticmethod(
        lambda *_: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    mem_get_info = staticmethod(_free_and_total_bytes)
    get_device_name = staticmethod(lambda *_: "CPU")
    get_rng_state = staticmethod(torch.get_rng_state)
    set_rng_state = staticmethod(torch.set_rng_state)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    empty_cache = ipc_collect = set_per_process_memory_fraction = staticmethod(_nothing)
    reset_peak_memory_stats = staticmethod(_nothing)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Lets verl use the CPU as a device."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _CpuDevice("sam_rollout_cpu_device")

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Machines with GPUs have a CPU, too. So a CPU's presence does not select this platform; the
        # environment variable does.
        return os.environ.get(PLATFORM_ENV) == "cpu"

    def current_device(self) -> torch.device:
        # verl passes the result to tensor.to(), so the result cannot be a device index.
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "VERL_CPU_VISIBLE_DEVICES"

    def ray_resource_name(self) -> str:
        return "GPU"  # verl accepts no other name, and Ray only counts units

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False  # weights travel through shared memory instead

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing
    nvtx_range = contextlib.nullcontext


def use_single_gloo_backend() -> None:
    """Make verl ask torch for the backend ``cpu:gloo`` when verl creates its process group.

    On a CPU, verl 0.9.1 asks for ``cpu:gloo,cpu:gloo``, which torch refuses. When verl has fixed
    this, ``tests/integration/test_verl_workarounds.py`` fails.
    """
    import verl.utils.distributed as verl_distributed

    original = verl_distributed.initialize_global_process_group_ray
    verl_distributed.initialize_global_process_group_ray = partial(original, backend="cpu:gloo")
