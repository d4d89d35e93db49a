import numpy as np
import pytest

from sam_rollout.simulation.chances import Acceptance
from sam_rollout.simulation.costs import StepCosts
from sam_rollout.simulation.rollout import Round


@pytest.fixture
def flat_costs():
    """0.1 s a decode step whatever the batch, 0.15 s a verify step of up to four drafts."""
    seconds = np.full((5, 1, 1), 0.15)
    seconds[0] = 0.1
    return StepCosts(np.ones(1), np.zeros(1), seconds)


@pytest.fixture
def make_round():
    def make(lengths, siblings=1, prompt=10, right=None):
        n = len(lengths)
        group = np.arange(n) // siblings
        return Round(np.full(n, prompt), np.array(lengths, np.int64), group, right)

    return make


@pytest.fixture
def always_right():
    return Acceptance(np.zeros(1), np.ones((1, 4)))
