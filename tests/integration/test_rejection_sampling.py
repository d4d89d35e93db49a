"""vLLM's rejection sampler on the CPU draws from the target distribution, at every position.

At T = 0 a broken sampler looks right; here it runs at T = 1 with drafts of our kind (one-hot, no
draft probabilities).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.integration.cpu_kernels import use_cpu_kernels
from tests.unit.verification.distributions import assert_drawn_from

VOCABULARY = 8
DRAWS = 60_000


@pytest.fixture(scope="module")
def rejection_sample():
    import vllm.v1.sample.rejection_sampler as sampler

    use_cpu_kernels()
    everyone = SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.ones(DRAWS), generators={}
    )

    def sample(drafts: torch.Tensor, logits: torch.Tensor, bonus: torch.Tensor) -> torch.Tensor:
        """Verify the same two drafts for every request; int32 [DRAWS, 3]."""
        ends = torch.arange(2, 2 * DRAWS + 1, 2, dtype=torch.int32)
        drafts, logits = drafts.to(torch.int32).repeat(DRAWS), logits.repeat(DRAWS, 1)
        return sampler.rejection_sample(drafts, [2] * DRAWS, 2, ends, None, logits, bonus, everyone)

    return sample


@pytest.mark.parametrize("kept", [VOCABULARY, 3], ids=["all tokens", "top-k 3"])
@pytest.mark.parametrize("draft_rank", [0, 2], ids=["likely draft", "unlikely draft"])
def test_every_position_follows_the_target(rejection_sample, kept, draft_rank):
    torch.manual_seed(0)
    logits = torch.randn(2, VOCABULARY) * 1.5
    for row in logits:  # top-k as the engine applies it before verification
        row[row < row.topk(kept).values[-1]] = -float("inf")
    target = logits.softmax(-1)
    drafts = target.argsort(-1, descending=True)[:, draft_rank]
    bonus = torch.multinomial(torch.ones(DRAWS, VOCABULARY), 1)
    output = rejection_sample(drafts, logits, bonus)
    assert_drawn_from(output[:, 0], target[0])
    accepted = output[:, 0] == drafts[0]
    # The second position is reached only through an accepted draft, and is independent of it.
    assert_drawn_from(output[accepted][:, 1], target[1])
    assert (output[~accepted][:, 1] == -1).all()
    both = accepted & (output[:, 1] == drafts[1])
    assert torch.equal(output[both][:, 2].long(), bonus[both][:, 0])


def test_a_padded_draft_is_rejected_and_a_token_of_the_target_takes_its_place(rejection_sample):
    torch.manual_seed(0)
    logits = torch.randn(2, VOCABULARY) * 1.5
    logits[0, -1] = 4.0  # right in front of the second row: likely to accept what is read there
    drafts = torch.tensor([VOCABULARY - 1, -1])
    output = rejection_sample(drafts, logits, torch.zeros(DRAWS, 1, dtype=torch.int64))
    accepted = output[:, 0] == VOCABULARY - 1
    assert accepted.sum() > DRAWS // 2
    assert_drawn_from(output[accepted][:, 1], logits[1].softmax(-1))
    assert (output[:, 2] == -1).all()
