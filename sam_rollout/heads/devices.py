"""The device of this process, and the processes that torchrun started to train one head."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from sam_rollout.heads.hidden_states import Policy, load_model
from sam_rollout.heads.peers import Peers


@contextmanager
def joined() -> Iterator[tuple[torch.device, Peers]]:
    """This process's device, an accelerator if there is one, and its peers.

    What an error leaves behind is torchrun's: it ends the other processes.
    """
    kind = (torch.accelerator.current_accelerator() or torch.device("cpu")).type
    if not distributed.is_torchelastic_launched():
        yield torch.device(kind), Peers()
        return
    device = torch.device(kind)
    if kind != "cpu":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    distributed.init_process_group(distributed.get_default_backend_for_device(device))
    yield device, Peers(distributed.group.WORLD)
    distributed.destroy_process_group()


@torch.no_grad()
def load_split(folder: str, device: torch.device) -> Policy:
    """Load a checkpoint of which every process holds a part; all of them read texts together.

    Raises:
        OSError, ValueError: no checkpoint that transformers knows, or splits.
    """
    model = load_model(folder, device, tp_plan="auto")
    sizes = model.config.get_text_config()
    # The layers themselves put together what they hold in parts.
    embeddings = model.get_input_embeddings()(torch.arange(sizes.vocab_size, device=device))
    unit = torch.eye(sizes.hidden_size, device=device, dtype=model.dtype)
    output = model.get_output_embeddings()(unit).T.contiguous()
    return Policy(model, embeddings.float(), output.float())
