"""Connects the processes that train one head together, each on its own texts."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")


class PeerError(RuntimeError):
    """Another process has failed."""


class Peers:
    """The processes of a torch.distributed group, or this process alone.

    All processes must make the same calls in the same order. Tensors must be on the device that the
    group's backend uses.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.size = 1 if group is None else distributed.get_world_size(group)
        self.rank = 0 if group is None else distributed.get_rank(group)

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self._group is not None:
            distributed.all_reduce(values, group=self._group)
        return values

    def take_over(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors with those of the first process."""
        if self._group is not None:
            for tensor in tensors:
                distributed.broadcast(tensor, group=self._group, group_src=0)

    def check(self, problem: Exception | None, device: torch.device) -> None:
        """Raise in all processes if one process has a problem."""
        if self._group is not None:
            met = self.sum(torch.tensor([float(problem is not None)], device=device)).item()
            if met and problem is None:
                raise PeerError("another process of the training failed; see its log")
        if problem is not None:
            raise problem

    def agree(self, mine: bool, device: torch.device) -> bool:
        """Return whether `mine` is true in all processes."""
        return not self.sum(torch.tensor([float(not mine)], device=device)).item()

    def attempt(self, work: Callable[[], T], device: torch.device) -> T:
        """Call a function in every process; raise in all processes if it fails in one process.

        If the function uses other groups of processes, all processes must use them in the same
        order.
        """
        problem, found = None, None
        try:
            found = work()
        except Exception as error:
            problem = error
        self.check(problem, device)
        return found  # type: ignore[return-value]


ALONE = Peers()


@contextmanager
def joined() -> Iterator[tuple[torch.device, Peers]]:
    """Return a context with this process's device (an accelerator if possible) and its peers.

    After an error, the group of processes is not destroyed, because torchrun ends all processes.
    """
    device = torch.device((torch.accelerator.current_accelerator() or torch.device("cpu")).type)
    if not distributed.is_torchelastic_launched():
        yield device, ALONE
        return
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    yield device, Peers(distributed.group.WORLD)
    distributed.destroy_process_group()
