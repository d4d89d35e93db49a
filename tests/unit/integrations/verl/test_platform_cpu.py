import pytest
import torch

from sam_rollout.integrations.verl.platform_cpu import PLATFORM_ENV, PlatformCPU


@pytest.mark.parametrize(("value", "chosen"), [("cpu", True), ("cuda", False), ("", False)])
def test_it_is_chosen_by_name_only(monkeypatch, value, chosen):
    monkeypatch.setenv(PLATFORM_ENV, value)
    assert PlatformCPU().is_platform_available() is chosen


def test_the_device_module_answers_what_trainers_ask_of_torch_cuda():
    module = PlatformCPU.device_module
    free, total = module.mem_get_info()
    assert 0 < 0.99 * module.memory_allocated() <= module.max_memory_allocated() <= total
    assert free <= total
    assert module.current_device is torch.cpu.current_device, "the rest comes from torch.cpu"
    with pytest.raises(AttributeError):
        module.no_such_function  # noqa: B018
