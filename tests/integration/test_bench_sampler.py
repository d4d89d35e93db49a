"""The sampler that the benchmark makes of vLLM's CPU kernels samples from the target."""

import pytest
import torch
from scipy.stats import chisquare

from sam_rollout.bench import stock


def test_vllm_kernels_sample_from_the_target():
    by_name = {sampler.name: sampler for sampler in stock.available("cpu")}
    if "vllm_cpu" not in by_name:
        pytest.skip("no CPU kernels in this vLLM")
    torch.manual_seed(0)
    batch, k = 1200, 2
    row = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1])
    probabilities = row.repeat(batch * k, 1)
    given = stock.StockInput(
        probabilities,
        torch.zeros(batch * k, dtype=torch.int64),
        torch.arange(1, batch + 1) * k,
        torch.full((batch, 1), 99),
        k,
    )
    output = by_name["vllm_cpu"].sample(given)
    counts = torch.bincount(output[:, 0], minlength=5)
    assert chisquare(counts.numpy(), (row * batch).numpy()).pvalue > 1e-4
    kept = (output[:, :2] == 0).all(dim=1)
    assert 0 < kept.sum() < batch
    assert ((output[:, 2] == 99) == kept).all()
