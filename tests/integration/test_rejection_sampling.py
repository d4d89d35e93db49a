"""vLLM's rejection sampler on the CPU draws from the target distribution, at every position.

At T = 0 a broken sampler looks right; here it runs at T = 1 with drafts of our kind (one-hot, no
draft probabilities).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import chisquare

from tests.integration.cpu_kernels import use_cpu_kernels

VOCABULARY = 8
DRAWS = 60_000
# Probability of a false alarm, per comparison.
ALPHA = 1e-4


@pytest.fixture(scope="module")
def rejection_sample():
    import vllm.v1.sample.rejection_sampler as sampler

    use_cpu_kernels()
    return sampler.rejection_sample


def _assert_follows(tokens: torch.Tensor, probabilities: torch.Tensor) -> None:
    counts = torch.bincount(tokens.long(), minlength=VOCABULARY).double()
    expected = probabilities.double() * len(tokens)
    impossible = expected == 0
    assert counts[impossible].sum() == 0
    counts, expected = counts[~impossible], expected[~impossible]
    result = chisquare(counts.numpy(), (expected * counts.sum() / expected.sum()).numpy())
    assert result.pvalue > ALPHA


@pytest.mark.parametrize("kept", [VOCABULARY, 3], ids=["all tokens", "top-k 3"])
@pytest.mark.parametrize("draft_rank", [0, 2], ids=["likely draft", "unlikely draft"])
def test_every_position_follows_the_target(rejection_sample, kept, draft_rank):
    torch.manual_seed(0)
    logits = torch.randn(2, VOCABULARY) * 1.5
    for row in logits:  # top-k as the engine applies it before verification
        row[row < row.topk(kept).values[-1]] = -float("inf")
    target = logits.softmax(-1)
    drafts = target.argsort(-1, descending=True)[:, draft_rank].to(torch.int32)
    bonus = torch.multinomial(torch.ones(DRAWS, VOCABULARY), 1)
    output = rejection_sample(
        drafts.repeat(DRAWS),
        [2] * DRAWS,
        2,
        torch.arange(2, 2 * DRAWS + 1, 2, dtype=torch.int32),
        None,
        logits.repeat(DRAWS, 1),
        bonus,
        SimpleNamespace(
            all_greedy=False, all_random=True, temperature=torch.ones(DRAWS), generators={}
        ),
    )
    _assert_follows(output[:, 0], target[0])
    accepted = output[:, 0] == drafts[0]
    # The second position is reached only through an accepted draft, and is independent of it.
    _assert_follows(output[accepted][:, 1], target[1])
    assert (output[~accepted][:, 1] == -1).all()
    both = accepted & (output[:, 1] == drafts[1])
    assert torch.equal(output[both][:, 2].long(), bonus[both][:, 0])


def test_a_padded_draft_is_rejected_and_a_token_of_the_target_takes_its_place(rejection_sample):
    torch.manual_seed(0)
    logits = torch.randn(2, VOCABULARY) * 1.5
    logits[0, -1] = 4.0  # right in front of the second row: likely to accept what is read there
    output = rejection_sample(
        torch.tensor([VOCABULARY - 1, -1], dtype=torch.int32).repeat(DRAWS),
        [2] * DRAWS,
        2,
        torch.arange(2, 2 * DRAWS + 1, 2, dtype=torch.int32),
        None,
        logits.repeat(DRAWS, 1),
        torch.zeros(DRAWS, 1, dtype=torch.int64),
        SimpleNamespace(
            all_greedy=False, all_random=True, temperature=torch.ones(DRAWS), generators={}
        ),
    )
    accepted = output[:, 0] == VOCABULARY - 1
    assert accepted.sum() > DRAWS // 2
    _assert_follows(output[accepted][:, 1], logits[1].softmax(-1))
    assert (output[:, 2] == -1).all()
