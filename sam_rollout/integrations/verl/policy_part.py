"""Reads the part of an FSDP2 policy that one of verl's training processes holds.

`policy_part_megatron.py` does the same for Megatron. `state_capture.py` uses both modules.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id

from sam_rollout.heads.hidden_states import Policy
from sam_rollout.heads.peers import Peers

PADDING = -1  # in place of a token number, if a hidden state belongs to no token
Step = Callable[[int, Any, Callable[[], Any]], Any]


class FsdpPart:
    """This process's part of the policy under FSDP2: all layers.

    With Ulysses' sequence parallelism, several processes share the same texts, and each process has
    only parts of them.

    Attributes:
        hidden: Length of a hidden state.
        sharers: Groups of processes that share texts. Each process has some of the hidden states,
            and zeros for all others. After a sum over each group, all processes have all states.
        share: Number of processes that share the same texts.
        rank: This process's rank among the processes that share texts.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._base = engine.module.base_model
        self.hidden = engine.module.config.hidden_size
        group = engine.ulysses_device_mesh["sp"].get_group() if engine.use_ulysses_sp else None
        peers = Peers(group)
        self.sharers: Sequence[Peers] = [peers] if group is not None else []
        self.share, self.rank = peers.size, peers.rank

    def modules(self, layers: Sequence[int]) -> dict[int, nn.Module]:
        """Return this process's modules whose outputs are the wanted hidden states.

        Args:
            layers: The numbers of layers after which states are taken; 0 means the embeddings.

        Returns:
            Index in `layers` -> module. The index `len(layers)` stands for the final norm.
        """
        base = self._base
        modules = [base.layers[n - 1] if n else base.embed_tokens for n in layers]
        return dict(enumerate([*modules, base.norm]))

    @contextmanager
    def watched(self, step: Step) -> Iterator[None]:
        """Return a context in which `step` runs each of verl's forward passes.

        `step` gets three arguments: the index of the chunk of layers (0 without virtual pipeline
        stages), the micro-batch, and a function that runs the pass.
        """
        forward = self._engine.forward_step

        def forward_step(micro_batch: Any, *args: Any, **kwargs: Any) -> Any:
            return step(0, micro_batch, lambda: forward(micro_batch, *args, **kwargs))

        with replaced(self._engine, forward_step):
            yield

    def tokens(self, output: Tensor, micro_batch: Any) -> Tensor:
        """Return the token number of each state in a module's output.

        Args:
            output: [..., hidden], the output of one of `modules` for this micro-batch.

        Returns:
            One number per state, on the host. Tokens are numbered from 0 over all texts of the
            micro-batch. A state that belongs to no token has the number `PADDING`.
        """
        offsets = micro_batch["input_ids"].offsets().tolist()
        rows, total = output.shape[1], offsets[-1]
        # Without Ulysses, texts may be padded to the same length. With Ulysses, texts are packed,
        # and the processes divide the packed tokens.
        if self.share == 1 and len(output) == len(offsets) - 1 and rows < total:
            texts = itertools.pairwise(offsets)
            return torch.cat([padded_tokens(begin, end - begin, rows) for begin, end in texts])
        return padded_tokens(0, total, rows * self.share)[rows * self.rank :][:rows]

    def matrices(self, peers: Peers) -> Policy:
        """Gather the embedding and output matrices in float32.

        Either all processes of `peers` succeed, or all of them fail.
        """
        module = self._engine.module
        inputs = module.get_input_embeddings().weight
        outputs = module.get_output_embeddings().weight
        tied = outputs is inputs
        peers.attempt(lambda: find_room(inputs.shape, tied), this_device())
        embeddings = _whole(inputs)
        return Policy(None, embeddings, embeddings if tied else _whole(outputs))


@contextmanager
def replaced(engine: Any, forward_step: Callable[..., Any]) -> Iterator[None]:
    """Replace an engine's `forward_step` while the context is active."""
    engine.forward_step = forward_step
    try:
        yield
    finally:
        del engine.__dict__["forward_step"]


def this_device() -> torch.device:
    """Return the device of this process."""
    return torch.empty(0, device=get_device_id()).device


def find_room(shape: Sequence[int], tied: bool) -> list[Tensor]:
    """Allocate as much memory as gathering needs: all matrices, and a copy of one in another dtype.

    All processes call this first, so that a process without enough memory fails before other
    processes wait for it.
    """
    count = 2 if tied else 3
    return [torch.empty(shape, dtype=torch.float32, device=this_device()) for _ in range(count)]


def padded_tokens(begin: int, length: int, rows: int) -> Tensor:
    """Return int64 [rows]: token numbers from `begin` to `begin + length - 1`, then `PADDING`."""
    return torch.arange(begin, begin + rows).masked_fill_(torch.arange(rows) >= length, PADDING)


def _whole(weight: Tensor) -> Tensor:
    weight = weight.detach().to(this_device())
    return (weight.full_tensor() if isinstance(weight, DTensor) else weight).float()
