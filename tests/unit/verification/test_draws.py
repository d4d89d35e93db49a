import pytest
import torch

from sam_rollout.verification import draw_tokens
from sam_rollout.verification.gumbel import draw_by_operations
from sam_rollout.verification.inverse_cdf import BLOCK
from tests.unit.verification.distributions import assert_drawn_from, bits, gumbel_draws, target

VOCABULARIES = [7, 2 * BLOCK, 1300, 3 * BLOCK]
CUTS = [{}, {"temperature": 0.6}, {"top_p": 0.9}, {"top_k": 5}, {"top_k": 40, "top_p": 0.8}]


def operations(probabilities, random):
    return draw_by_operations(probabilities.log(), random)


@pytest.fixture(
    params=[draw_tokens, gumbel_draws, operations], ids=["inversion", "gumbel", "operations"]
)
def draw(request):
    return request.param


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_tokens_follow_their_row(draw, vocabulary, cut):
    if cut.get("top_k", 0) > vocabulary:
        cut = cut | {"top_k": 3}
    rows = target(2, vocabulary, **cut)
    for seed, row in enumerate(rows):
        assert_drawn_from(draw(row.expand(3000, -1), bits(3000, seed=seed)), row)


@pytest.mark.parametrize("vocabulary", [1300, 151_936])
def test_the_last_token_is_reached(draw, vocabulary):
    row = torch.full((1, vocabulary), 0.5 / (vocabulary - 1))
    row[0, -1] = 0.5
    tokens = draw(row.expand(200, -1), bits(200))
    assert 60 < (tokens == vocabulary - 1).sum() < 140


def test_a_large_vocabulary_in_bins(draw):
    vocabulary, draws, per_call = 151_936, 2000, 50
    row = target(1, vocabulary, temperature=0.6)[0]
    generator = torch.Generator().manual_seed(1)
    bins = torch.randint(50, (vocabulary,), generator=generator)
    rows = row.expand(per_call, -1)  # no copies: the test stays small
    random = bits(draws).view(-1, per_call)
    tokens = torch.cat([draw(rows, part) for part in random])
    masses = torch.zeros(50, dtype=torch.float64).index_add_(0, bins, row.double())
    assert_drawn_from(bins[tokens], masses)


@pytest.mark.parametrize("vocabulary", [*VOCABULARIES, 151_936])
def test_a_row_alone_is_the_row_in_a_batch(draw, vocabulary):
    rows = 8 if vocabulary > 10_000 else 64
    probabilities, random = target(rows, vocabulary), bits(rows)
    together = draw(probabilities, random)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
    assert draw(probabilities[order], random[order]).tolist() == together[order].tolist()
    for row in range(rows):
        alone = draw(probabilities[row : row + 1], random[row : row + 1])
        assert alone.tolist() == together[row : row + 1].tolist()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("extreme", [0, -1, (1 << 63) - 1, -(1 << 63)])
def test_extreme_bits_draw_possible_tokens(draw, vocabulary, extreme):
    probabilities = target(32, vocabulary, top_k=3)
    tokens = draw(probabilities, torch.full((32,), extreme))
    assert (probabilities.gather(1, tokens[:, None]) > 0).all()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
def test_broken_rows_yield_valid_ids_and_leave_the_others_alone(draw, vocabulary, value):
    probabilities, random = target(12, vocabulary), bits(12)
    random[:2] = torch.tensor([0, -1])
    good = draw(probabilities, random)
    broken = probabilities.clone()
    broken[0:6] = value
    broken[6, vocabulary // 2] = value
    tokens = draw(broken, random)
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert tokens[7:].tolist() == good[7:].tolist()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_all_bits_0_mean_the_first_possible_token_all_bits_1_the_last(vocabulary):
    probabilities = target(32, vocabulary, top_k=3)
    possible = (probabilities > 0).int()
    first, last = (draw_tokens(probabilities, torch.full((32,), bits)) for bits in (0, -1))
    assert first.tolist() == possible.argmax(dim=1).tolist()
    assert last.tolist() == (vocabulary - 1 - possible.flip(1).argmax(dim=1)).tolist()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_larger_numbers_draw_later_tokens(vocabulary):
    unsigned = [step << 55 for step in range(512)]
    random = torch.tensor([number - (number >> 63 << 64) for number in unsigned])
    uniform = torch.full((512, vocabulary), 1 / vocabulary)
    tokens = draw_tokens(uniform, random)
    exact = torch.arange(512) * vocabulary / 512
    assert (tokens - exact).le(1).all() and (exact - tokens).le(2).all()
    assert (tokens.diff() >= 0).all()
