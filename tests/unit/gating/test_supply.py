"""What drafts would bring by the least chance asked of their tokens."""

import numpy as np
import pytest

from sam_rollout.gating.supply import LEVELS, Calibration, Supply
from sam_rollout.verified import CHANCES, Offered

HIGH, LOW = CHANCES.index(0.7), CHANCES.index(0.1)  # classes


def offered(rows: int = 16, right: float = 0.75, **tokens: int) -> Offered:
    """`high` and `low` tokens of these classes, all judged; of the high ones `right` were."""
    told = np.zeros((4, len(CHANCES)))
    told[:2, HIGH] = tokens.get("high", 0)
    told[:2, LOW] = tokens.get("low", 0)
    told[2] = told[1] * np.where(np.arange(len(CHANCES)) == HIGH, right, 0.11)
    told[3] = told[1] * np.where(np.arange(len(CHANCES)) == HIGH, 0.75, 0.11)
    return Offered(rows, told)


def supply_of(*steps: Offered) -> Supply:
    supply = Supply(calibration := Calibration())
    for step in steps:
        calibration.observe(step)
        supply.observe(step)
    return supply


def test_a_level_takes_what_has_its_chance_or_a_higher_one():
    tokens, accepted, _ = supply_of(*[offered(high=8, low=32)] * 50).by_level()
    assert len(tokens) == len(accepted) == LEVELS
    assert tokens[HIGH] == accepted[HIGH] == 0, "a level above"
    assert tokens[1 + HIGH] == tokens[LOW] == pytest.approx(0.5)
    assert accepted[1 + HIGH] == pytest.approx(0.5 * 0.75, rel=0.01)
    assert tokens[1 + LOW] == tokens[-1] == pytest.approx(2.5)
    assert accepted[-1] == pytest.approx(0.5 * 0.75 + 2 * 0.11, rel=0.01)


def test_a_drafter_that_expects_too_much_is_corrected():
    _, accepted, _ = supply_of(*[offered(high=16, right=0.3)] * 100).by_level()
    assert accepted[-1] == pytest.approx(0.3, rel=0.05)


@pytest.mark.parametrize(("right", "share"), [(0.75, 0.7), (0.25, 0.25)])
def test_looks_that_are_far_better_than_expected_outweigh_what_was_learned(right, share):
    """By far: four right ones of sixteen, where three were before, prove nothing."""
    calibration = Calibration()
    for _ in range(200):
        calibration.observe(offered(high=16, right=0.2))
    before = calibration.shares()[HIGH]
    for _ in range(3):
        calibration.observe(look := offered(high=16, right=right))
        calibration.look(look)
    after = calibration.shares()[HIGH]
    assert after == pytest.approx(share, abs=0.06)
    assert (after > 2 * before) == (right > 0.5)


def test_one_that_was_never_judged_is_believed():
    step = offered(high=16)
    step.tokens[1:] = 0
    _, accepted, _ = supply_of(step).by_level()
    assert 0.7 <= accepted[-1] < 0.8


def test_offers_are_forgotten_and_their_spread_is_known():
    steps = [offered(high=16)] * 50 + [offered(high=high) for high in (0, 32) * 50]
    tokens, _, spread = supply_of(*steps).by_level()
    assert tokens[-1] == pytest.approx(1, abs=0.1)
    # 16 requests with 0 or 32 tokens in all: 16 more or fewer.
    assert np.sqrt(16) * spread[-1] == pytest.approx(16, rel=0.1)
    tokens, _, spread = supply_of(*steps, *[offered(low=16)] * 200).by_level()
    assert tokens[1 + HIGH] < 0.01 and spread[1 + HIGH] < 0.1
    assert tokens[-1] == pytest.approx(1, abs=0.01)
