from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.exactness import (
    add_noise,
    gumbel_changes,
    inversion_changes,
    made_up,
    measure,
    tokens_before_a_change,
)
from tests.unit.verification.distributions import coupling, target


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}], ids=str)
def test_closed_forms_are_what_they_are_by_definition(cut):
    p, q = (target(6, 40, seed=seed, **cut).double() for seed in (1, 2))
    p, q = p / p.sum(-1, keepdim=True), (0.9 * p + 0.1 * q) / (0.9 * p + 0.1 * q).sum(-1)[:, None]
    expected = [1 - coupling(*pair) for pair in zip(p, q, strict=True)]
    assert gumbel_changes(p, q).tolist() == pytest.approx(expected)
    numbers = (torch.arange(200_000) + 0.5).double() / 200_000
    for row in range(6):
        drawn = [torch.searchsorted(one[row].cumsum(-1), numbers) for one in (p, q)]
        changed = float((drawn[0] != drawn[1]).double().mean())
        assert float(inversion_changes(p, q)[row]) == pytest.approx(changed, abs=1e-3)


def test_gumbel_noise_changes_at_most_two_tv_and_far_fewer_tokens_than_inversion():
    row = measure(made_up(np.full(16, 4.0), partial(add_noise, size=0.01)), draws=4)
    inversion, gumbel = row["samplers"]["inversion"], row["samplers"]["gumbel"]
    assert row["tv"] <= gumbel["expected"] <= 2 * row["tv"]
    assert inversion["expected"] > 20 * gumbel["expected"]
    assert row["entropy"] == pytest.approx(4.0, abs=0.01)
    for one in (inversion, gumbel):  # counted shares agree with the closed form
        expected = one["expected"] * 16 * 4
        assert abs(one["changed"] * 16 * 4 - expected) < 5 * expected**0.5 + 1


def test_tokens_before_a_change_are_a_sum_of_probabilities():
    for share in (1e-5, 1e-3, 0.5):
        expected = sum((1 - share) ** n for n in range(1, 10_001))
        assert tokens_before_a_change(share) == pytest.approx(expected)
    assert tokens_before_a_change(0.0) == 10_000
