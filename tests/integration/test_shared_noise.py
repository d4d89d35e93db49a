"""A real model and a worse copy of it: how often equal noise draws the same token."""

from __future__ import annotations

import copy

import pytest
import torch

from sam_rollout.verification import draw_gumbel, keyed_bits
from tests.integration.conftest import MODEL
from tests.unit.verification.distributions import coupling


@pytest.fixture(scope="module")
def logits(prompts) -> list[torch.Tensor]:
    """Of the model and of its copy at every position of the prompts: float32 [rows, vocabulary]."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    drafter = copy.deepcopy(target)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            if weight.dim() > 1:
                weight.add_(0.2 * weight.std() * torch.randn_like(weight))
        return [
            torch.cat([model(torch.tensor([prompt])).logits[0] for prompt in prompts])
            for model in (target, drafter)
        ]


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.0])
def test_drafts_with_the_targets_noise_are_accepted_as_often_as_said(logits, temperature):
    p, q = ((rows / temperature).softmax(dim=-1) for rows in logits)
    positions = torch.arange(len(p))
    tokens, drafts = (
        draw_gumbel(rows, keyed_bits(torch.full_like(positions, 5), positions)) for rows in (p, q)
    )
    accepted = float((tokens == drafts).double().mean())
    variation = (p - q).abs().sum(dim=1) / 2
    expected = torch.tensor([coupling(*rows) for rows in zip(p.double(), q.double(), strict=True)])
    assert (expected >= (1 - variation) / (1 + variation) - 1e-5).all()
    assert (expected <= 1 - variation + 1e-5).all()
    deviation = float((expected * (1 - expected)).sum().sqrt() / len(p))
    assert abs(accepted - float(expected.mean())) < 4.5 * deviation
    # What noise of another key, that is, an ordinary draft, would have brought.
    assert accepted > float((p * q).sum(dim=1).mean()) + 0.01
