"""Our verification does what vllm-ascend's does: the same tokens on the same random numbers."""

from __future__ import annotations

import pytest
import torch
from vllm_ascend.sample import rejection_sampler as stock

from sam_rollout.config import ConfigError
from tests.ascend import functions_adapter as ours

NO_TOKEN = -1
SEEDS = range(200)


class Case:
    """A random batch: up to four drafts a request, often none, some of them padding."""

    def __init__(self, seed: int, vocabulary: int = 7) -> None:
        torch.manual_seed(seed)
        self.batch = int(torch.randint(1, 6, ()))
        self.counts = torch.randint(0, 5, (self.batch,))
        self.counts[0].clamp_(min=1)  # vllm-ascend's functions do not run without any draft
        self.num_drafts, self.max_drafts = int(self.counts.sum()), int(self.counts.max())
        self.cumulative = self.counts.cumsum(0).to(torch.int32)
        self.drafts = torch.randint(vocabulary, (self.num_drafts,), dtype=torch.int32)
        self.drafts[torch.rand(self.num_drafts) < 0.05] = NO_TOKEN
        shape = (self.num_drafts, vocabulary)
        self.target = (2 * torch.randn(shape)).softmax(dim=-1)
        self.proposed = torch.randn(shape).softmax(dim=-1)
        self.uniform = torch.rand(self.num_drafts, dtype=torch.float64)
        self.recovered = torch.randint(100, 200, (self.num_drafts,), dtype=torch.int32)
        self.bonus = torch.randint(200, 300, (self.batch, 1), dtype=torch.int32)
        self.greedy = torch.rand(self.batch) < 0.3

    def empty(self) -> torch.Tensor:
        return torch.full((self.batch, self.max_drafts + 1), NO_TOKEN, dtype=torch.int32)


def both(name: str, empty: torch.Tensor, *arguments, **options) -> list[list[list[int]]]:
    """What a function of vllm-ascend and ours of that name write into an empty output."""
    outputs = [empty.clone(), empty.clone()]
    for module, output in zip((stock, ours), outputs, strict=True):
        getattr(module, name)(output, *arguments, **options)
    return [output.tolist() for output in outputs]


@pytest.mark.parametrize("with_draft_model", [False, True])
def test_random_requests_get_the_same_tokens(with_draft_model):
    for seed in SEEDS:
        case = Case(seed)
        theirs, found = both(
            "rejection_random_sample_pytorch", case.empty(), case.cumulative, case.drafts,
            case.proposed if with_draft_model else None, case.target, case.bonus, case.recovered,
            case.uniform, case.greedy, case.max_drafts, case.target.shape[1],
            IS_NGRAM=not with_draft_model,
        )  # fmt: skip
        assert theirs == found, seed


def test_greedy_requests_get_the_same_tokens():
    for seed in SEEDS:
        case = Case(seed, vocabulary=2)  # so that drafts are often right
        theirs, found = both(
            "rejection_greedy_sample_pytorch", case.empty(), case.cumulative, case.drafts,
            case.target.argmax(dim=-1), case.bonus, case.counts.tolist(), case.max_drafts,
            case.greedy if seed % 2 else None,
        )  # fmt: skip
        assert theirs == found, seed


def test_one_greedy_draft_each_gets_the_same_tokens():
    drafts, likeliest = torch.tensor([[1, 2, 3], [1, 5, 3]], dtype=torch.int32)
    bonus = torch.tensor([[7], [8], [9]], dtype=torch.int32)
    empty = torch.full((3, 2), NO_TOKEN, dtype=torch.int32)
    name = "rejection_greedy_sample_spec_len_1_pytorch"
    theirs, found = both(name, empty, drafts, likeliest, bonus)
    assert theirs == found == [[1, 7], [5, NO_TOKEN], [3, 9]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32])
def test_values_are_expanded_alike(dtype):
    for seed in SEEDS:
        case = Case(seed)
        values = torch.randint(0, 3, (case.batch,)).to(dtype)
        for replace in ((0, 0), (0, 1)):
            arguments = (values, case.cumulative, case.num_drafts, *replace)
            expected = stock.expand_batch_to_tokens(*arguments)
            assert torch.equal(ours.expand_batch_to_tokens(*arguments), expected)


def test_a_draft_of_probability_zero_is_never_accepted():
    """vllm-ascend accepts it when the random number is exactly zero."""
    drafts = torch.tensor([0], dtype=torch.int32)
    output = torch.full((1, 2), NO_TOKEN, dtype=torch.int32)
    ours.rejection_random_sample_pytorch(
        output, torch.tensor([1]), drafts, None, torch.tensor([[0.0, 1.0]]), torch.tensor([[9]]),
        torch.tensor([1]), torch.zeros(1, dtype=torch.float64), torch.tensor([False]), 1, 2,
        IS_NGRAM=True,
    )  # fmt: skip
    assert output.tolist() == [[1, NO_TOKEN]]


def test_a_reduced_vocabulary_is_refused():
    logits, indices = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"additional_config\.enable_reduce_sample = True"):
        ours.rejection_sample(
            torch.tensor([1]), [1], 1, torch.tensor([1]), None, (logits, indices), None, None
        )
