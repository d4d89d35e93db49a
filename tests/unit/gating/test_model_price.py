import numpy as np
import pytest

from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import Verified
from sam_rollout.gating.model_price import MODEL, TEXTS, ModelPrice
from sam_rollout.gating.step import EngineStep

ROWS = 16
DEAR = {TEXTS: (10.0, 2.0), MODEL: (20.0, 3.0)}
WORTH_IT = {TEXTS: (10.0, 2.0), MODEL: (12.0, 3.0)}


class Engine:
    def __init__(self, price: ModelPrice, rows: int = ROWS) -> None:
        self.price, self.rows, self.now_ns = price, rows, 0
        self.ways: list[int] = []

    def run(self, costs, steps: int, *, is_open=True, pause_every=0, same_batch=True) -> None:
        for number in range(steps):
            way = MODEL if self.price.pays else TEXTS
            self.ways.append(way)
            ms, tokens = costs[way]
            if pause_every and number % pause_every == 0:
                ms += 1000
            self.now_ns += int(1e6 * ms)
            of_row = np.full(self.rows, int(tokens), np.int32)
            of_row[: round((tokens - int(tokens)) * self.rows)] += 1
            nothing = np.zeros(self.rows, np.int32)
            verified = Verified(of_row, *[nothing] * (len(Verified._fields) - 1))
            lengths = np.full(self.rows, 100, np.int32)
            step = EngineStep(self.now_ns, verified, lengths, same_batch=same_batch)
            self.price.observe(step, is_open=is_open)

    def share(self, way: int, last: int) -> float:
        return self.ways[-last:].count(way) / last


@pytest.fixture
def engine() -> Engine:
    return Engine(ModelPrice(Limits(64, 1 << 20)))


def test_a_model_that_pays_stays_and_trials_become_rare(engine):
    for _ in range(20):
        engine.run(WORTH_IT, 500)
        engine.price.expect_better()
    assert engine.share(MODEL, 10_000) > 0.97
    assert engine.share(MODEL, 4_000) > 0.98


def test_a_model_that_does_not_pay_is_left_out_soon(engine):
    engine.run(DEAR, 400)
    assert not engine.price.pays
    engine.run(DEAR, 10_000)
    assert engine.share(TEXTS, 10_000) > 0.97


def test_it_comes_back_when_texts_bring_less(engine):
    engine.run(DEAR, 2_000)
    engine.run({TEXTS: (10.0, 1.1), MODEL: (20.0, 3.0)}, 6_000)
    assert engine.price.pays and engine.share(MODEL, 1_000) > 0.9


@pytest.mark.parametrize("learns", [False, True])
def test_a_model_that_learns_comes_back_sooner(learns):
    engine = Engine(ModelPrice(Limits(64, 1 << 20)))
    engine.run(DEAR, 3_000)
    if learns:
        engine.price.expect_better()
    engine.run(WORTH_IT, 400)
    assert engine.price.pays == learns


def test_pauses_decide_nothing(engine):
    engine.run(WORTH_IT, 3_000, pause_every=50)
    assert engine.price.pays


def test_every_number_of_requests_has_its_own_answer():
    price = ModelPrice(Limits(64, 1 << 20))
    few, many = Engine(price, 2), Engine(price, 64)
    few.run(WORTH_IT, 2_000)
    many.now_ns = few.now_ns
    many.run(DEAR, 2_000)
    assert not price.pays
    few.now_ns = many.now_ns
    few.run(WORTH_IT, 1)
    assert price.pays


def test_a_gate_that_stays_closed_with_the_model_gets_to_try_texts_alone(engine):
    engine.run(WORTH_IT, 300, is_open=False)
    assert not engine.price.pays
    engine.run(WORTH_IT, 2_000)
    assert engine.share(MODEL, 500) > 0.9


def test_steps_that_cannot_be_measured_decide_nothing(engine):
    engine.run(DEAR, 3_000, same_batch=False)
    assert engine.price.pays and engine.share(MODEL, 3_000) == 1
