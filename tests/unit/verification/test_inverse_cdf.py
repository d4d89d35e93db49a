"""Inversion: which number draws which token, and probabilities as integers."""

import pytest
import torch

from sam_rollout.verification import draw_tokens
from sam_rollout.verification.inverse_cdf import BLOCK, FRACTION_BITS, to_fixed_point
from tests.unit.verification.distributions import target

# One level; the largest of one level; two levels with a block cut short, and with whole blocks.
VOCABULARIES = [7, 2 * BLOCK, 1300, 3 * BLOCK]


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_all_bits_0_mean_the_first_possible_token_all_bits_1_the_last(vocabulary):
    probabilities = target(32, vocabulary, top_k=3)
    possible = (probabilities > 0).int()
    first, last = (draw_tokens(probabilities, torch.full((32,), bits)) for bits in (0, -1))
    assert first.tolist() == possible.argmax(dim=1).tolist()
    assert last.tolist() == (vocabulary - 1 - possible.flip(1).argmax(dim=1)).tolist()


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_larger_numbers_draw_later_tokens(vocabulary):
    """The bits are read as a fraction, most significant first."""
    unsigned = [step << 55 for step in range(512)]
    random = torch.tensor([number - (number >> 63 << 64) for number in unsigned])
    uniform = torch.full((512, vocabulary), 1 / vocabulary)
    tokens = draw_tokens(uniform, random)
    exact = torch.arange(512) * vocabulary / 512
    assert (tokens - exact).le(1).all() and (exact - tokens).le(2).all()
    assert (tokens.diff() >= 0).all()


def test_fixed_point_keeps_the_possible_possible():
    values = torch.tensor([0.0, 1e-38, 2.0**-FRACTION_BITS, 0.5, 1.0])
    expected = [0, 1, 1, 1 << (FRACTION_BITS - 1), 1 << FRACTION_BITS]
    assert to_fixed_point(values).tolist() == expected
