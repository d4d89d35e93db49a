from collections.abc import Callable

import torch
from scipy.stats import chisquare

from sam_rollout.bench.stock_samplers import StockInput


def check_rejection_sampling(sample: Callable[[StockInput], torch.Tensor]) -> None:
    torch.manual_seed(0)
    batch, k = 1200, 2
    row = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1, 0.0])
    probabilities = row.repeat(batch * k, 1)
    given = StockInput(
        probabilities.clone(),
        torch.zeros(batch * k, dtype=torch.int64),
        torch.arange(1, batch + 1) * k,
        torch.full((batch, 1), 99),
        k,
    )
    output = sample(given)
    assert output.dtype == torch.int32 and output.shape == (batch, k + 1)
    assert torch.equal(given.probabilities, probabilities)
    for place in (output[:, 0], output[output[:, 0] == 0, 1]):
        counts = torch.bincount(place, minlength=len(row))
        expected = row[:5].double() * len(place)
        assert chisquare(counts[:5].numpy(), expected.numpy()).pvalue > 1e-4
        assert counts[5] == 0
    kept = (output[:, :2] == 0).all(dim=1)
    assert 0 < kept.sum() < batch
    assert ((output[:, 2] == 99) == kept).all()
    assert ((output[:, 2] == -1) == ~kept).all()
    assert ((output[:, 1] == -1) == (output[:, 0] != 0)).all()
