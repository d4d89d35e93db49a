from functools import partial

import pytest
import torch

from sam_rollout.bench.counting import count
from sam_rollout.verification import (
    DraftLayout,
    draw_tokens,
    keyed_bits,
    verify_coupled,
    verify_vectorised,
)
from sam_rollout.verification.gumbel import draw_by_operations
from tests.unit.verification.distributions import bits, layout_of, target


def coupled_inversion(batch, counts, drafts, probabilities, draw=draw_tokens):
    layout = DraftLayout(counts.cumsum(0), len(drafts), 8)
    keys = torch.arange(batch)[layout.request_of_row]
    tokens = draw(probabilities, keyed_bits(keys, keys))
    verify_coupled(layout, drafts, tokens)


def coupled(batch, counts, drafts, probabilities):
    coupled_inversion(batch, counts, drafts, probabilities, draw_by_operations)


def vectorised(batch, counts, drafts, probabilities, **options):
    layout = DraftLayout(counts.cumsum(0), len(drafts), 8)
    rows = len(probabilities)
    verify_vectorised(layout, drafts, probabilities, bits(rows), bits(rows, stream=1), **options)


def vectorised_greedy(batch, counts, drafts, probabilities):
    vectorised(batch, counts, drafts, probabilities, greedy=torch.arange(batch) % 2 == 0)


@pytest.mark.parametrize("vocabulary", [50, 1300])
@pytest.mark.parametrize(
    "call",
    [coupled, coupled_inversion, vectorised, vectorised_greedy],
    ids=lambda call: call.__name__,
)
def test_the_same_operations_at_any_size_and_none_that_waits(call, vocabulary):
    kernels = []
    for batch, k in ((1, 1), (2, 1), (16, 4), (64, 8)):
        counts = k - torch.arange(batch) % 2  # ragged
        layout = layout_of(counts)
        drafts = torch.arange(layout.num_drafts) % vocabulary
        probabilities = target(layout.num_rows, vocabulary)
        found = count(partial(call, batch, counts, drafts, probabilities))
        assert found.synchronisations == 0
        kernels.append(found.kernels)
    assert len(set(kernels[1:])) == 1  # torch shortens repeat_interleave for a single request
