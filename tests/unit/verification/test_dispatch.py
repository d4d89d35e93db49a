"""Neither a host synchronisation nor a loop over requests: the same few operations at any size."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sam_rollout.verification import (
    DraftLayout,
    draw_tokens,
    keyed_bits,
    verify_coupled,
    verify_vectorised,
)
from sam_rollout.verification.gumbel import draw_by_operations
from tests.unit.verification.distributions import bits, layout_of, target

SYNCHRONISES = {
    "_local_scalar_dense", "item", "nonzero", "is_nonzero", "masked_select", "_unique2", "equal",
}  # fmt: skip


class Recorder(TorchDispatchMode):
    """Names of the operations, and those among them that would make the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.__name__.partition(".")[0]
        self.names.append(name)
        masks = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype == torch.bool
            for index in (args[1] if isinstance(args[1], list | tuple) else ())
        )
        unsized = name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in SYNCHRONISES or masks or unsized:
            self.waits.append(name)
        return func(*args, **kwargs)


def coupled_inversion(batch, counts, drafts, probabilities, draw=draw_tokens):
    layout = DraftLayout(counts.cumsum(0), len(drafts), 8)
    keys = torch.arange(batch)[layout.request_of_row]
    tokens = draw(probabilities, keyed_bits(keys, keys))
    verify_coupled(layout, drafts, tokens)


def coupled(batch, counts, drafts, probabilities):
    """Where a device has a kernel of its own, it is one operation."""
    coupled_inversion(batch, counts, drafts, probabilities, draw_by_operations)


def vectorised(batch, counts, drafts, probabilities, **options):
    layout = DraftLayout(counts.cumsum(0), len(drafts), 8)
    rows = len(probabilities)
    verify_vectorised(layout, drafts, probabilities, bits(rows), bits(rows, stream=1), **options)


def vectorised_greedy(batch, counts, drafts, probabilities):
    vectorised(batch, counts, drafts, probabilities, greedy=torch.arange(batch) % 2 == 0)


def vectorised_with_distributions(batch, counts, drafts, probabilities):
    proposals = probabilities[: len(drafts)]
    scratch = torch.empty(batch, probabilities.shape[1])
    vectorised(batch, counts, drafts, probabilities, draft_probabilities=proposals, scratch=scratch)


@pytest.mark.parametrize("vocabulary", [50, 1300])
@pytest.mark.parametrize(
    "call",
    [
        coupled,
        coupled_inversion,
        vectorised,
        vectorised_greedy,
        vectorised_with_distributions,
    ],
    ids=lambda call: call.__name__,
)
def test_the_same_operations_at_any_size_and_none_that_waits(call, vocabulary):
    names = []
    for batch, k in ((1, 1), (2, 1), (16, 4), (64, 8)):
        counts = k - torch.arange(batch) % 2  # ragged
        layout = layout_of(counts)
        drafts = torch.arange(layout.num_drafts) % vocabulary
        probabilities = target(layout.num_rows, vocabulary)
        with Recorder() as recorder:
            call(batch, counts, drafts, probabilities)
        assert recorder.waits == []
        names.append(recorder.names)
    assert names[1] == names[2] == names[3]  # torch shortens repeat_interleave for a single request


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x[0].item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 1],
        lambda x: x.nonzero(),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 3])),
        lambda x: range(x.long()[1]),
    ],
)
def test_the_recorder_sees_what_waits(wait):
    with Recorder() as recorder:
        wait(torch.arange(3))
    assert recorder.waits
