import pytest
import torch

from sam_rollout.verification import DraftLayout, draw_tokens, keyed_bits, verify_coupled
from tests.unit.verification.distributions import gumbel_draws

VOCABULARY, LENGTH, SEEDS = 50, 100, 20
CONTEXT = 3  # number of last tokens that the toy model reads
MAX_K = 8

TABLES = torch.randn(CONTEXT, VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(0))
GREEDY = torch.arange(SEEDS) % 4 == 0
KEYS = torch.arange(SEEDS) * 1_000_003


def probabilities_after(text: list[int]) -> torch.Tensor:
    logits = sum(table[token] for table, token in zip(TABLES, reversed(text), strict=False))
    return (logits / 0.8).softmax(dim=-1)


def write(draw, propose) -> tuple[list[list[int]], int]:
    """Write all texts in one batch; return them without their starts, and the number of steps."""
    texts = [[seed % VOCABULARY] * CONTEXT for seed in range(SEEDS)]
    steps = 0
    while any(len(text) < CONTEXT + LENGTH for text in texts):
        drafts = [propose(seed, text) for seed, text in enumerate(texts)]
        counts = torch.tensor([len(draft) for draft in drafts])
        layout = DraftLayout(counts.cumsum(0), int(counts.sum()), int(counts.max()))
        rows, positions = [], []
        for text, draft in zip(texts, drafts, strict=True):
            for place in range(len(draft) + 1):
                rows.append(probabilities_after(text + draft[:place]))
                positions.append(len(text) + place)
        rows, request = torch.stack(rows), layout.request_of_row
        drawn = draw(rows, keyed_bits(KEYS[request], torch.tensor(positions)))
        targets = torch.where(GREEDY[request], rows.argmax(dim=-1), drawn)
        flat = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int64)
        for text, new in zip(texts, verify_coupled(layout, flat, targets).tolist(), strict=True):
            text += [token for token in new if token >= 0]
        steps += 1
    return [text[CONTEXT : CONTEXT + LENGTH] for text in texts], steps


@pytest.fixture(scope="module", params=[draw_tokens, gumbel_draws], ids=["inversion", "gumbel"])
def draw(request):
    return request.param


@pytest.fixture(scope="module")
def reference(draw) -> list[list[int]]:
    texts, steps = write(draw, lambda seed, text: [])
    assert steps == LENGTH
    assert len({tuple(text) for text in texts}) == SEEDS
    return texts


@pytest.mark.parametrize("rightness", [0.0, 0.5, 1.0])
def test_random_numbers_of_drafts_of_mixed_quality(draw, reference, rightness):
    generator = torch.Generator().manual_seed(4)

    def propose(seed: int, text: list[int]) -> list[int]:
        at = len(text) - CONTEXT
        k = int(torch.randint(1, MAX_K + 1, (), generator=generator))
        right = torch.rand(k, generator=generator) < rightness
        other = torch.randint(-1, VOCABULARY, (k,), generator=generator).tolist()  # -1: padding
        true = reference[seed][at : at + k]
        return [t if r else o for t, r, o in zip(true, right, other, strict=False)]

    texts, steps = write(draw, propose)
    assert texts == reference
    assert (steps < LENGTH) == (rightness > 0)
