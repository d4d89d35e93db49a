"""The processes that train one head together, each on texts of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, distributed


class Peers:
    """This process alone, or all of a group of torch.distributed.

    All of them make the same calls in the same order. Tensors lie where the group's backend wants
    them.

    Args:
        group: None for this process alone.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = 1 if group is None else distributed.get_world_size(group)
        self.rank = 0 if group is None else distributed.get_rank(group)

    def sum(self, values: Tensor) -> Tensor:
        """Add up what all have, in place."""
        if self._group is not None:
            distributed.all_reduce(values, group=self._group)
        return values

    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors by those of the first process."""
        if self._group is not None:
            for tensor in tensors:
                distributed.broadcast(tensor, group=self._group, group_src=0)

    def average(self, values: Tensor, weight: float) -> Tensor:
        """The mean of values [n], each process's with its weight; zeros where nobody has any."""
        total = self.sum(torch.cat([values * weight, values.new_tensor([weight])]))
        return total[:-1] / total[-1].clamp(min=torch.finfo(total.dtype).tiny)
