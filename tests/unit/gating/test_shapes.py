"""The measuring gate chooses between chains and trees."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest

from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered
from sam_rollout.gating import EngineStep, hands_over
from sam_rollout.gating.auto import AutoGate
from tests.unit.gating.steps import engine_step

K, EXPLORATION = 16, 0.005
CHAIN, TREE = 0, 1
# Chances of the tokens that a request is offered, of each shape. A tree has other tokens beside
# those of the chain, each worth less than the one before.
ALONE = 0.6 ** np.arange(1, K + 1)
BESIDE = np.array([0.2, 0.12, 0.12, 0.08, 0.07, 0.07, 0.04, 0.04])
OFFERS = ALONE, np.sort(np.concatenate([ALONE[:8], BESIDE]))[::-1]


def flat(tokens: int, shape: int) -> float:
    """What an accelerator takes that waits for its memory."""
    return 20e-3 + 5e-5 * max(0, tokens - 256)


def linear(tokens: int, shape: int) -> float:
    """Every token costs time, and a tree takes a tenth more than a chain of as many tokens."""
    return (8e-3 + 4e-4 * tokens) * (1 + 0.1 * shape)


def dear_trees(tokens: int, shape: int) -> float:
    return 20e-3 + 10e-3 * shape


def class_of(chance: float) -> int:
    return next(i for i, least in enumerate(CHANCES) if chance >= least)


class Engine:
    """Decodes the same requests for ever; offers follow from the shape of the drafts.

    Attributes:
        shapes: of the drafts of each step, None while the gate was closed or looked.
        s_per_token: of all steps.
    """

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        rows: int = 8,
        noise: float = 0.0,
        offers: tuple[np.ndarray, np.ndarray] = OFFERS,
    ) -> None:
        self.seconds, self.rows, self.noise, self.offers = seconds, rows, noise, offers
        self.gate = AutoGate(Limits(64, 1 << 20, k=K), EXPLORATION, shapes=2)
        self.shapes: list[int | None] = []
        self.trials: list[bool] = []
        self._random = np.random.default_rng(0)
        self._now = 0.0
        self._texts = np.full(rows, 100, np.int32)
        self._drafted, self._step = 0, None  # tokens of a request; shape and least chance
        self.passed_s, self.tokens = 0.0, 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._observe()
            budget = self.gate.budget(self.rows)
            shape, least = self.gate.shape, self.gate.least_chance
            self._step = (shape, least) if budget else None
            self._drafted = int((self.offers[shape] >= least).sum()) if budget else 0
            is_open = hands_over(budget, least)
            self.shapes.append(shape if is_open else None)
            self.trials.append(self.gate.is_trial)

    def _observe(self) -> None:
        shape, _ = self._step or (CHAIN, 0.0)
        seconds = self.seconds(self.rows * (1 + self._drafted), shape)
        seconds *= max(0.2, 1 + self.noise * self._random.standard_normal())
        offered, right = None, np.zeros(self.rows, int)
        if self._step is not None:
            chances = self.offers[shape]
            asked = min(self._drafted + 1, K)  # one is held back
            proved = self._random.random((self.rows, K)) < chances
            right = proved[:, : self._drafted].sum(1)
            told = np.zeros((4, len(CHANCES)))
            for place in range(asked):
                of_place = self.rows, self.rows, proved[:, place].sum(), self.rows * chances[place]
                told[:, class_of(chances[place])] += of_place
            offered = Offered(self.rows, told)
        sampled = (1 + right).astype(np.int32)
        self._texts = self._texts + sampled
        self._now += seconds
        self.passed_s += seconds
        self.tokens += int(sampled.sum())
        drafted = np.full(self.rows, self._drafted, np.int32)
        step: EngineStep = engine_step(
            int(self._now * 1e9), sampled, drafted, self._texts, offered=offered
        )
        self.gate.observe(step)

    def share_of(self, shape: int, last: int) -> float:
        return self.shapes[-last:].count(shape) / last


def test_where_tokens_are_free_drafts_become_trees():
    engine = Engine(flat)
    engine.run(400)
    assert engine.share_of(TREE, 200) > 0.95
    assert engine.shapes.index(TREE) < 200


@pytest.mark.parametrize("seconds", [linear, dear_trees])
def test_where_tokens_or_trees_are_dear_drafts_are_chains(seconds):
    """What a tree has beside the chain is not worth its time."""
    engine = Engine(seconds)
    engine.run(2000)
    assert engine.share_of(TREE, 1900) < 0.05
    assert seconds is dear_trees or engine.share_of(CHAIN, 1900) > 0.9


@pytest.mark.parametrize("seconds", [flat, linear])
def test_noise_does_not_let_the_shape_flap(seconds):
    engine = Engine(seconds, noise=0.15)
    engine.run(3000)
    chosen = [s for s, t in zip(engine.shapes, engine.trials, strict=True) if not t][500:]
    shapes = [shape for shape in chosen if shape is not None]
    changes = sum(a != b for a, b in pairwise(shapes))
    assert changes <= 2


def test_shapes_that_are_as_good_hardly_change():
    engine = Engine(flat, noise=0.15, offers=(OFFERS[CHAIN], OFFERS[CHAIN]))
    engine.run(4000)
    chosen = [s for s, t in zip(engine.shapes, engine.trials, strict=True) if not t]
    changes = sum(a != b for a, b in pairwise(chosen))
    assert changes < 20
    counters = engine.gate.drain()
    assert counters["gate/trial_loss_s"] < EXPLORATION * engine.passed_s + 10 * 20e-3


def test_what_is_filled_up_is_a_chain():
    engine = Engine(flat)
    engine.run(600)
    assert engine.gate.budget(engine.rows, whole=True) == K
    for _ in range(8):
        engine.gate.budget(engine.rows, whole=True)
    assert engine.gate.shape == CHAIN


def test_trees_are_counted():
    engine = Engine(flat)
    engine.run(400)
    counters = engine.gate.drain()
    assert counters["gate/tree_steps"] == engine.shapes.count(TREE)
    assert counters["gate/open_steps"] == len(engine.shapes) - engine.shapes.count(None)
    alone = AutoGate(Limits(64, 1 << 20, k=K), EXPLORATION)
    assert "gate/tree_steps" not in alone.drain()


def test_trees_are_tried_where_other_trials_leave_no_room():
    engine = Engine(flat)
    engine.run(60)
    engine.gate._lost_s += 1.0  # more than this run earns
    engine.run(400)
    assert engine.share_of(TREE, 200) > 0.9
