"""The part of a policy that lies in one of verl's training processes, as FSDP2 divides it.

`policy_part_megatron.py` has the same for Megatron. Both tell where in a process states appear,
and which tokens they are of; `state_capture.py` puts them together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id

from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.peers import Peers

PADDING = -1  # in place of a token's number
Step = Callable[[int, Any, Callable[[], Any]], Any]


class PolicyPart(Protocol):
    """What of the policy lies in this process.

    Attributes:
        hidden: length of a hidden state.
        sharers: groups of processes to sum over, one after the other. After the last, every process
            that shares texts with others has the states of all of them.
        share: how many processes share the same texts.
        rank: which of them this one is.
    """

    hidden: int
    sharers: Sequence[Peers]
    share: int
    rank: int

    def modules(self, layers: Sequence[int]) -> Mapping[int, nn.Module]:
        """Modules of this process that give states.

        Args:
            layers: after how many layers states are taken; 0 are the embeddings.

        Returns:
            By the index in `layers`; behind the last index what the output matrix is applied to.
        """

    def watched(self, step: Step) -> AbstractContextManager[None]:
        """A context in which verl's forward passes run as parts of `step`.

        Args:
            step: is given which chunk of the policy runs, a micro-batch, and what runs it.
        """

    def tokens(self, output: Tensor, micro_batch: Any) -> Tensor:
        """Which token of a micro-batch each of an output's states is of.

        Args:
            output: [..., hidden], of one of `modules`, in the pass over this micro-batch.

        Returns:
            On the host, in the order of the states; tokens are counted over all texts in a row,
            from 0 on. `PADDING` where there is none.
        """

    def matrices(self, peers: Peers) -> Policy:
        """The policy's two matrices, whole, on this process's device, in float32.

        Args:
            peers: all processes; where one has no memory for the matrices, this fails in all.
        """


class FsdpPart:
    """With FSDP2: every layer runs in every process, over texts or (Ulysses) a part of them."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._base = engine.module.base_model
        self.hidden = engine.module.config.hidden_size
        group = engine.ulysses_device_mesh["sp"].get_group() if engine.use_ulysses_sp else None
        peers = Peers(group)
        self.sharers: Sequence[Peers] = [peers] if group is not None else []
        self.share, self.rank = peers.size, peers.rank

    def modules(self, layers: Sequence[int]) -> dict[int, nn.Module]:
        base = self._base
        modules = [base.layers[n - 1] if n else base.embed_tokens for n in layers]
        return dict(enumerate([*modules, base.norm]))

    @contextmanager
    def watched(self, step: Step) -> Iterator[None]:
        forward = self._engine.forward_step

        def forward_step(micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
            return step(0, micro_batch, lambda: forward(micro_batch, *args, **kwargs))

        with replaced(self._engine, forward_step):
            yield

    def tokens(self, output: Tensor, micro_batch: Any) -> Tensor:
        offsets = micro_batch["input_ids"].offsets().tolist()
        rows, total = output.shape[1], offsets[-1]
        # Texts padded to the longest: not with Ulysses, which divides a row of packed texts.
        if self.share == 1 and len(output) == len(offsets) - 1 and rows < total:
            texts = itertools.pairwise(offsets)
            return torch.cat([padded_tokens(begin, end - begin, rows) for begin, end in texts])
        return padded_tokens(0, total, rows * self.share)[rows * self.rank :][:rows]

    def matrices(self, peers: Peers) -> Policy:
        module = self._engine.module
        inputs, outputs = (
            part.weight for part in (module.get_input_embeddings(), module.get_output_embeddings())
        )
        tied = outputs is inputs
        peers.attempt(lambda: find_room(inputs.shape, tied), this_device())
        embeddings = _whole(inputs)
        return Policy(None, embeddings, embeddings if tied else _whole(outputs))


@contextmanager
def replaced(engine: Any, forward_step: Callable[..., Any]) -> Iterator[None]:
    """Let an engine call another function for every micro-batch."""
    engine.forward_step = forward_step
    try:
        yield
    finally:
        del engine.__dict__["forward_step"]


def this_device() -> torch.device:
    """Where this process computes."""
    return torch.empty(0, device=get_device_id()).device


def find_room(shape: Sequence[int], tied: bool) -> list[Tensor]:
    """Allocate what putting the matrices together takes: each of them, and one that is converted.

    Asked for before processes begin: then none waits for one that runs out of memory on the way.
    """
    count = 2 if tied else 3
    return [torch.empty(shape, dtype=torch.float32, device=this_device()) for _ in range(count)]


def padded_tokens(begin: int, length: int, rows: int) -> Tensor:
    """The numbers of a text's tokens, from `begin` on, and padding behind them, as int64 [rows]."""
    return torch.arange(begin, begin + rows).masked_fill_(torch.arange(rows) >= length, PADDING)


def _whole(weight: Tensor) -> Tensor:
    weight = weight.detach().to(this_device())
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).float()
