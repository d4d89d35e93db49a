from itertools import pairwise

import numpy as np
import pytest

from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered
from sam_rollout.gating import hands_over
from sam_rollout.gating.auto import AutoGate
from tests.unit.gating.steps import engine_step

K, EXPLORATION = 16, 0.005
CHAIN, TREE = 0, 1
# Chances of a request's draft tokens. ALONE has the chances of a chain. A tree has the first half
# of this chain, and other tokens, whose chances are in BESIDE.
ALONE = 0.6 ** np.arange(1, K + 1)
BESIDE = np.array([0.2, 0.12, 0.12, 0.08, 0.07, 0.07, 0.04, 0.04])
OFFERS = ALONE, np.sort(np.concatenate([ALONE[:8], BESIDE]))[::-1]


def flat(tokens: int, shape: int) -> float:
    return 20e-3 + 5e-5 * max(0, tokens - 256)


def linear(tokens: int, shape: int) -> float:
    return (8e-3 + 4e-4 * tokens) * (1 + 0.1 * shape)


def dear_trees(tokens: int, shape: int) -> float:
    return 20e-3 + 10e-3 * shape


def class_of(chance: float) -> int:
    return next(i for i, least in enumerate(CHANCES) if chance >= least)


class Engine:
    """Decodes the same requests forever.

    Attributes:
        seconds: Maps scored tokens and a shape to the time of a step.
        rows: Number of requests, of which the first ones may have drafts (see `may`).
        may: For each shape, the share of requests that may have drafts of this shape.
        heard: Shapes of which the gate gets offers.
        shapes: Shape of the drafts of each step; None if the gate was closed.
        chosen: Like `shapes`, but without the steps that were trials.
    """

    def __init__(self, seconds, rows=8, noise=0.0, offers=OFFERS, may=(1.0, 1.0)) -> None:
        self.seconds, self.rows, self.noise, self.offers = seconds, rows, noise, offers
        self.gate = AutoGate(Limits(64, 1 << 20, k=K), EXPLORATION, shapes=2)
        self.may, self.heard = may, (CHAIN, TREE)
        self.shapes: list[int | None] = []
        self.chosen: list[int | None] = []
        self._random = np.random.default_rng(0)
        self._context = 100 * rows  # tokens of all requests
        self._drafted, self._each, self._step = np.zeros(rows, np.int32), 0, None
        self.passed_s = 0.0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._observe()
            budget = self.gate.budget(self.rows)
            shape, least = self.gate.shape, self.gate.least_chance
            self._step = (shape, least) if budget else None
            self._each = int((self.offers[shape] >= least).sum()) if budget else 0
            self._drafted = np.zeros(self.rows, np.int32)
            self._drafted[: self._drafting(shape)] = self._each
            is_open = hands_over(budget, least)
            self.shapes.append(shape if is_open else None)
            self.chosen += self.shapes[-1:] * (not self.gate.is_trial)

    def _drafting(self, shape: int) -> int:
        return round(self.rows * self.may[shape])

    def _observe(self) -> None:
        shape, _ = self._step or (CHAIN, 0.0)
        rows = len(self._drafted)  # requests of the step that ends
        seconds = self.seconds(rows + int(self._drafted.sum()), shape)
        seconds *= max(0.2, 1 + self.noise * self._random.standard_normal())
        offered, right = None, np.zeros(rows, int)
        if self._step is not None:
            chances = self.offers[shape]
            asked = min(self._each + 1, K)  # the drafts, and one token held back
            proved = self._random.random((rows, K)) < chances
            drafting = np.count_nonzero(self._drafted) if self._each else self._drafting(shape)
            proved[drafting:] = False
            right = proved[:, : self._each].sum(1)
            told = np.zeros((4, len(CHANCES)))
            for place in range(asked):
                is_right = proved[:drafting, place].sum()
                of_place = drafting, drafting, is_right, drafting * chances[place]
                told[:, class_of(chances[place])] += of_place
            offered = Offered(drafting, told) if shape in self.heard else None
        sampled = (1 + right).astype(np.int32)
        self._context += int(sampled.sum())
        self.passed_s += seconds
        texts = np.full(rows, self._context // rows, np.int32)
        texts[0] += self._context % rows
        more = {"offered": offered, "may_draft": self.may}
        step = engine_step(int(self.passed_s * 1e9), sampled, self._drafted, texts, **more)
        self.gate.observe(step)

    def share_of(self, shape: int, last: int) -> float:
        return self.shapes[-last:].count(shape) / last


def test_where_tokens_are_free_drafts_become_trees_which_are_counted():
    engine = Engine(flat)
    engine.run(400)
    assert engine.share_of(TREE, 200) > 0.95
    assert engine.shapes.index(TREE) < 200
    counters = engine.gate.drain()
    assert counters["gate/tree_steps"] == engine.shapes.count(TREE)
    assert counters["gate/open_steps"] == len(engine.shapes) - engine.shapes.count(None)
    alone = AutoGate(Limits(64, 1 << 20, k=K), EXPLORATION)
    assert "gate/tree_steps" not in alone.drain()


@pytest.mark.parametrize("seconds", [linear, dear_trees])
def test_where_tokens_or_trees_are_dear_drafts_are_chains(seconds):
    engine = Engine(seconds)
    engine.run(2000)
    assert engine.share_of(TREE, 1900) < 0.05
    assert seconds is dear_trees or engine.share_of(CHAIN, 1900) > 0.9


@pytest.mark.parametrize("seconds", [flat, linear])
def test_noise_does_not_let_the_shape_flap(seconds):
    engine = Engine(seconds, noise=0.15)
    engine.run(3000)
    shapes = [shape for shape in engine.chosen[500:] if shape is not None]
    assert sum(a != b for a, b in pairwise(shapes)) <= 2


def test_shapes_that_are_as_good_hardly_change():
    engine = Engine(flat, noise=0.15, offers=(OFFERS[CHAIN], OFFERS[CHAIN]))
    engine.run(4000)
    assert sum(a != b for a, b in pairwise(engine.chosen)) < 20
    counters = engine.gate.drain()
    assert counters["gate/trial_loss_s"] < EXPLORATION * engine.passed_s + 10 * 20e-3


def test_what_is_filled_up_is_a_chain():
    engine = Engine(flat)
    engine.run(600)
    assert engine.gate.budget(engine.rows, whole=True) == K
    for _ in range(8):
        engine.gate.budget(engine.rows, whole=True)
    assert engine.gate.shape == CHAIN


def test_trees_are_not_tried_where_no_request_may_have_one():
    engine = Engine(flat, may=(1.0, 0.0))
    engine.run(1000)
    assert engine.share_of(CHAIN, 900) > 0.98
    assert TREE not in engine.shapes


def test_chains_are_not_looked_for_where_no_request_may_have_drafts():
    engine = Engine(flat, may=(0.0, 0.0))
    engine.run(1000)
    assert engine.gate.drain()["gate/trials"] < 30


@pytest.mark.parametrize(("share", "best"), [(0.25, CHAIN), (1.0, TREE)])
def test_trees_of_a_part_of_the_requests_count_as_what_they_are(share, best):
    engine = Engine(flat, may=(1.0, share))
    engine.run(2000)
    assert engine.share_of(best, 1500) > 0.95


def test_the_shape_follows_the_requests_that_may_have_trees():
    engine = Engine(flat)
    engine.run(400)
    assert engine.share_of(TREE, 100) > 0.9
    engine.may = (1.0, 0.0)
    engine.run(100)
    assert engine.share_of(CHAIN, 98) > 0.95
    engine.may = (1.0, 1.0)
    engine.run(500)
    assert engine.share_of(TREE, 100) > 0.9


def test_a_series_of_trials_ends_where_nothing_is_heard_of_it():
    engine = Engine(linear)
    engine.heard = (CHAIN,)
    engine.run(2000)
    assert 0 < engine.shapes.count(TREE) < 200


def test_a_series_of_trials_is_dropped_where_another_load_changed_the_shape():
    """Trials of the first series have trees. A later series must not use their offers."""
    sure = np.ones(K)
    engine = Engine(lambda tokens, shape: 20e-3, rows=2, offers=(sure, sure))
    while engine.shapes.count(TREE) < 40:  # until the second series is under way
        engine.run(1)
    engine.rows, engine.may = 8, (0.0, 1.0)
    engine.run(1)
    engine.rows, engine.may = 2, (1.0, 1.0)
    engine.run(20)
    assert engine.shapes[-20:] == [TREE] * 20, "a new series has to wait"


def test_trials_are_as_rare_where_the_number_of_requests_goes_up_and_down():
    engine = Engine(linear)
    engine.run(1000)
    for turn in range(100):
        engine.rows = 7 + turn % 2  # the gate measures loads by octaves: 4 to 7, 8 to 15
        engine.run(20)
    assert engine.share_of(TREE, 2000) < 0.05


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_trees_that_become_dearer_are_given_up(noise):
    engine = Engine(flat, noise=noise)
    engine.run(800)
    assert engine.share_of(TREE, 200) > 0.9
    engine.seconds = lambda tokens, shape: flat(tokens, shape) * (1.5 if shape == TREE else 1.0)
    engine.run(1000)
    assert engine.share_of(CHAIN, 300) > 0.9


def test_what_chains_offer_is_not_forgotten_while_trees_are_drafted():
    engine = Engine(flat)
    engine.run(1500)
    assert engine.share_of(TREE, 1000) > 0.97
    assert engine.shapes[-1000:].count(None) < 10, "few steps only look at what chains offer"


BETTER = np.sort(np.concatenate([ALONE[:8], np.full(8, 0.5)]))[::-1]


def test_better_trees_are_found_where_a_part_of_the_requests_may_draft():
    engine = Engine(
        lambda tokens, shape: 20e-3, rows=48, offers=(ALONE, ALONE.copy()), may=(0.4, 0.4)
    )
    engine.run(800)
    engine.offers[TREE][:] = BETTER
    engine.run(2400)
    assert engine.share_of(TREE, 800) > 0.9
