"""Replaces torch_npu, so that vllm-ascend's Python code runs with all tensors on a CPU.

Put ``tests/ascend/stand_in`` on PYTHONPATH. The stand-in cannot test numerics, graphs,
communication or speed of an NPU.

* ``torch.npu`` has one device, an Ascend910B1 (an A2). Its streams, events and graphs are mocks.
* Operators that samplers need are written in torch. All other names of torch_npu are mocks.
* In modules that have no build for a CPU, every name is a mock.
* ``pin_memory`` is ignored, because torch refuses it without an accelerator.
"""

import importlib.abc
import importlib.machinery
import sys
from functools import wraps
from types import ModuleType
from unittest.mock import MagicMock

import torch

GIB = 1 << 30
WITHOUT_CPU_BUILD = ("acl", "fla_npu", "mooncake", "torch_npu", "torchaudio", "torchvision")
# Functions of torch that take `pin_memory`.
FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


class Placeholder(ModuleType):
    """A module that has every attribute and every submodule."""

    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of `WITHOUT_CPU_BUILD` that are not installed."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in WITHOUT_CPU_BUILD:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Placeholder(spec.name)

    def exec_module(self, module):
        pass


def npu_top_k_top_p(logits, k=None, p=None):
    """Apply top-k, and then top-p to the renormalised probabilities that are left."""
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    sorted_probabilities, order = probabilities.sort(dim=-1, descending=True)
    keep = torch.ones_like(sorted_probabilities, dtype=torch.bool)
    if k is not None:
        keep &= torch.arange(logits.shape[1]) < k.unsqueeze(1)
    if p is not None:
        kept = sorted_probabilities * keep
        kept = kept / kept.sum(dim=-1, keepdim=True)
        keep &= kept.cumsum(dim=-1) - kept < p.unsqueeze(1)
    keep = torch.zeros_like(keep).scatter_(1, order, keep)
    return logits.masked_fill(~keep, float("-inf"))


def _make_torch_npu_namespace():
    npu = MagicMock(name="torch.npu")
    npu.current_device = lambda: 0
    npu.device_count = lambda: 1
    npu.is_available = lambda: True
    npu.mem_get_info = lambda *_args, **_kwargs: (60 * GIB, 64 * GIB)
    npu.get_device_name = lambda *_args: "Ascend910B1"
    npu.get_soc_version = lambda: 220
    return npu


def _without_pinning(function):
    @wraps(function)
    def call(*args, **kwargs):
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)

    return call


def _install():
    this = sys.modules[__name__]
    this.__class__ = Placeholder
    sys.meta_path.append(PlaceholderFinder())  # comes last, so that installed modules win
    torch.utils.rename_privateuse1_backend("npu")
    torch.npu = this.npu = _make_torch_npu_namespace()
    torch.version.cann = None
    torch.distributed.is_hccl_available = lambda: True
    this._C = MagicMock(name="torch_npu._C", _NPUTaskGroupHandle=MagicMock)
    sys.modules["torch_npu._C"] = this._C
    sys.modules["torch_npu._C._distributed_c10d"] = this._C._distributed_c10d
    this.npu_format_cast = lambda weight, _format: weight
    for name in FACTORIES:
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self


_install()
