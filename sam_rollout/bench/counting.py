"""Counts the kernels, synchronisations and bytes of a call.

The counts come from the operations that PyTorch dispatches, which are the same on every device.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# For these operations, the host waits for a value or size from the device.
_SYNCHRONISE = {
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero", "_unique2",
}  # fmt: skip
_NO_KERNEL = {"empty", "empty_like", "new_empty", "empty_strided", "lift_fresh"}
# These operations read as much of their first argument as they return.
_GATHER = {"index", "gather", "index_select"}
# These operations write their first argument and do not read it.
_WRITE = {"fill_", "zero_", "copy_", "exponential_", "uniform_", "scatter_", "index_put_"}


@dataclass
class Counts:
    """The counts of one call."""

    kernels: int = 0
    synchronisations: int = 0
    nbytes: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func.__name__.partition(".")[0]
        if self._synchronises(name, args, kwargs):
            self.counts.synchronisations += 1
        if not (func.is_view or name in _NO_KERNEL or name == "_local_scalar_dense"):
            self.counts.kernels += 1
            self.counts.nbytes += _bytes_touched(name, args, kwargs, result)
        return result

    @staticmethod
    def _synchronises(name: str, args: tuple, kwargs: dict) -> bool:
        if name in ("index", "index_put_"):  # a mask decides the result's size
            return any(index.dtype == torch.bool for index in _tensors(args[1]))
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        return name in _SYNCHRONISE


def count(call: Callable[[], Any]) -> Counts:
    """Return the counts of one call.

    The function should have been called once before, so that no initialisation is counted.
    """
    with _Counter() as counter:
        call()
    return counter.counts


def _bytes_touched(name: str, args: tuple, kwargs: dict, result: Any) -> int:
    inputs = _tensors((args, {key: value for key, value in kwargs.items() if key != "out"}))
    if name in _GATHER:
        returned = sum(map(_nbytes, _tensors(result)))
        return sum(map(_nbytes, inputs[1:])) + 2 * returned
    if name in ("scatter_", "index_put_"):
        return 2 * sum(map(_nbytes, inputs[1:]))
    read = inputs[1:] if name in _WRITE else inputs
    return sum(map(_nbytes, read)) + sum(map(_nbytes, _tensors(result)))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's values; an expanded dimension takes no bytes."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()
