from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sam_rollout.heads.peers import PeerError, Peers
from sam_rollout.integrations.verl import policy_part
from sam_rollout.integrations.verl.policy_part import FsdpPart
from tests.processes import in_processes

VOCABULARY, HIDDEN = 12, 4


class Module(nn.Module):
    base_model = None
    config = SimpleNamespace(hidden_size=HIDDEN)

    def __init__(self, tied):
        super().__init__()
        self.inputs = nn.Embedding(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        self.outputs = nn.Linear(HIDDEN, VOCABULARY, bias=False, dtype=torch.bfloat16)
        if tied:
            self.outputs.weight = self.inputs.weight

    def get_input_embeddings(self):
        return self.inputs

    def get_output_embeddings(self):
        return self.outputs


def part_of(module):
    return FsdpPart(SimpleNamespace(module=module, use_ulysses_sp=False))


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_the_policys_in_float32(tied, monkeypatch):
    monkeypatch.setattr(policy_part, "get_device_id", lambda: torch.device("cpu"))
    module = Module(tied)
    found = part_of(module).matrices(Peers())
    assert torch.equal(found.embeddings, module.inputs.weight.float())
    assert torch.equal(found.output, module.outputs.weight.float())
    assert (found.embeddings is found.output) == tied


def no_room(rank):
    """Return the error of this process when the second process has no memory for the matrices."""

    def allocate(*_args, **_kwargs):
        raise torch.OutOfMemoryError("no memory")

    policy_part.get_device_id = lambda: torch.device("cpu")
    if rank == 1:
        policy_part.find_room = allocate
    try:
        part_of(Module(tied=True)).matrices(Peers(torch.distributed.group.WORLD))
    except (PeerError, torch.OutOfMemoryError) as error:
        return [type(error).__name__]
    return []


def test_where_one_has_no_memory_none_waits_for_it():
    assert in_processes(no_room, 2) == [["PeerError"], ["OutOfMemoryError"]]
