"""The CPU as verl sees it."""

import pytest
import torch
import verl.utils.distributed as verl_distributed
from verl.plugin.platform import PlatformRegistry

from sam_rollout.integrations.verl.platform_cpu import (
    PLATFORM_ENV,
    PlatformCPU,
    use_single_gloo_backend,
)


@pytest.fixture
def platform():
    return PlatformCPU()


def test_verl_finds_it_under_its_name():
    assert PlatformRegistry.get("cpu") is PlatformCPU


@pytest.mark.parametrize(("value", "chosen"), [("cpu", True), ("cuda", False), (None, False)])
def test_it_is_chosen_by_name_only(platform, monkeypatch, value, chosen):
    if value is None:
        monkeypatch.delenv(PLATFORM_ENV, raising=False)
    else:
        monkeypatch.setenv(PLATFORM_ENV, value)
    assert platform.is_platform_available() is chosen


def test_what_it_is_to_verl(platform):
    assert torch.ones(1).to(platform.current_device()).device.type == "cpu"
    assert (platform.device_name, platform.device_count()) == ("cpu", 1)
    # One logical GPU stands for a training process, whose weights travel through shared memory.
    assert (platform.ray_resource_name(), platform.ray_noset_envvars()) == ("GPU", [])
    assert (platform.is_ipc_supported(), platform.communication_backend_name()) == (False, "gloo")


def test_what_a_cpu_lacks_does_nothing(platform):
    platform.set_device(0)
    platform.synchronize()
    platform.empty_cache()
    platform.set_allocator_settings("expandable_segments:True")
    platform.profiler_start()
    platform.profiler_stop()
    with platform.nvtx_range("step"):
        assert platform.cudart() is None
    assert platform.get_device_capability() == (None, None)


def test_the_device_module_answers_what_trainers_ask_of_torch_cuda(platform):
    module = platform.device_module
    free, total = module.mem_get_info()
    # The kernel keeps the two figures in different counters, a few pages apart.
    assert 0 < 0.99 * module.memory_allocated() <= module.max_memory_allocated() <= total
    assert free <= total
    assert module.is_available() and module.get_device_name() == "CPU"
    module.empty_cache()
    module.synchronize()
    assert module.current_device is torch.cpu.current_device, "the rest comes from torch.cpu"
    with pytest.raises(AttributeError):
        module.no_such_function  # noqa: B018


def test_random_numbers_repeat_under_its_seed(platform):
    platform.manual_seed(5)
    state = platform.device_module.get_rng_state()
    first = torch.rand(3)
    platform.device_module.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


def test_the_process_group_names_the_cpu_once(monkeypatch):
    asked = []

    def verls_own(timeout_second=None, backend=None):
        asked.append((timeout_second, backend))

    name = "initialize_global_process_group_ray"
    monkeypatch.setattr(verl_distributed, name, verls_own)
    use_single_gloo_backend()
    wrapped = getattr(verl_distributed, name)
    use_single_gloo_backend()
    assert getattr(verl_distributed, name) is wrapped, "wrapped once only"
    wrapped(timeout_second=60)
    wrapped(backend="cpu:mpi")
    assert asked == [(60, "cpu:gloo"), (None, "cpu:mpi")]
