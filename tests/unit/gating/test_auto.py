import dataclasses

import numpy as np
import pytest

from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered
from sam_rollout.gating import ScheduleGate
from sam_rollout.gating.auto import AutoGate
from sam_rollout.gating.gate import hands_over
from tests.unit.gating.steps import engine_step
from tests.unit.gating.synthetic import (
    K,
    SyntheticEngines,
    compute_bound,
    linear,
    memory_bound,
    tail,
)

REQUESTS, EXPLORATION = 32, 0.005
CLOSED = ScheduleGate({}, K)


REGIMES = {
    "drafts pay always": SyntheticEngines(memory_bound, lambda rows, now: 0.7),
    "drafts pay in the tail only": SyntheticEngines(linear, lambda rows, now: 0.3),
    "better drafts in the tail": SyntheticEngines(memory_bound, lambda r, now: 0.5 * (r < 16)),
    "drafts never pay": SyntheticEngines(compute_bound, lambda rows, now: 0.3),
    "drafts are always wrong": SyntheticEngines(linear, lambda rows, now: 0.0),
    "wrong but nearly free": SyntheticEngines(memory_bound, lambda rows, now: 0.0),
    "noise and pauses": SyntheticEngines(linear, lambda r, now: 0.5, noise=0.15, pauses=0.02),
    "acceptance comes and goes": SyntheticEngines(linear, lambda r, now: 0.8 * (now % 10 < 5)),
    "room two steps after it is called for": SyntheticEngines(linear, lambda r, now: 0.3, ahead=2),
    "the same, all or nothing": SyntheticEngines(linear, lambda r, now: 0.3, ahead=2, whole=True),
    "the same, and drafts are always wrong": SyntheticEngines(linear, lambda r, now: 0.0, ahead=2),
}


def auto() -> AutoGate:
    return AutoGate(Limits(REQUESTS, 1 << 20, k=K), EXPLORATION)


NOTHING_PAYS = (
    "drafts never pay", "drafts are always wrong", "wrong but nearly free",
    "the same, and drafts are always wrong",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(REGIMES.keys() - set(NOTHING_PAYS)))
def test_as_fast_as_the_best_fixed_choice(name):
    engine = REGIMES[name]
    fixed = [CLOSED] + [ScheduleGate({t: k}, k) for t in (4, 16, REQUESTS) for k in (1, 2, 4, 8)]
    best = min(engine.run(gate, rounds=2) for gate in fixed)
    gate = auto()
    engine.run(gate, rounds=1, seed=1)
    assert engine.run(gate, rounds=2) < 1.03 * best


def test_what_there_is_no_room_for_is_done_when_there_is():
    gate, engine = auto(), REGIMES["drafts pay always"]
    engine.run(gate, rounds=1)
    gate.drain()
    rows, sampled = 4, np.ones(4, np.int32)
    for step in range(8):
        gate.observe(engine_step(step * 5_000_000, sampled, 0 * sampled, 100 + step * sampled))
        assert gate.budget(rows, room=step >= 6) == K, "it wants drafts even without room"
        assert not gate.is_trial
    report = gate.drain()
    assert (report["gate/open_steps"], report["gate/trials"]) == (2, 0)


@pytest.mark.parametrize("name", NOTHING_PAYS)
def test_hardly_slower_than_a_closed_gate_where_nothing_pays(name):
    engine = REGIMES[name]
    gate = auto()
    engine.run(gate, rounds=1, seed=1)
    assert engine.run(gate, rounds=2) < (1.01 + EXPLORATION) * engine.run(CLOSED, rounds=2)


BETTER = {
    "found": ((0.0, 1.0), (0.7, 1.0), 150),
    "better than expected": ((0.1, 1.0), (0.1, 7.0), 700),
}


@pytest.mark.parametrize("name", BETTER)
def test_drafts_that_become_good_after_a_hopeless_time_are_soon_made(name):
    before, after, soon = BETTER[name]
    gate = Recorder()

    def engine(acceptance, fulfilled, lengths):
        world = SyntheticEngines(linear, lambda rows, now: acceptance, [lengths])
        return dataclasses.replace(world, fulfilled=fulfilled, noise=0.05)

    engine(*before, tail(32, 100)).run(gate, rounds=3)
    gate.given.clear()
    engine(*after, np.full(16, 1000.0)).run(gate, rounds=1)
    opened = np.convolve(np.array(gate.given) > 0, np.ones(20), "valid") >= 15
    assert opened.any() and opened.argmax() < soon
    gate.given.clear()
    engine(*after, np.full(6, 400.0)).run(gate, rounds=1)
    assert np.mean(np.array(gate.given) > 0) > 0.9


@pytest.mark.parametrize("name", ["drafts are always wrong", "drafts pay in the tail only"])
def test_trials_stay_within_their_budget(name):
    gate = auto()
    REGIMES[name].run(gate, rounds=3)
    counters = gate.drain()
    advance = 10 * linear(REQUESTS, REQUESTS * (1 + K), 100_000)
    assert counters["gate/trials"] > 0
    assert counters["gate/trial_loss_s"] <= EXPLORATION * counters["gate/decoding_s"] + advance


class Recorder(AutoGate):
    def __init__(self) -> None:
        super().__init__(Limits(REQUESTS, 1 << 20, k=K), EXPLORATION)
        self.given: list[int] = []
        self.prices: list[float] = []  # `least_chance` in each step with an open gate

    def budget(self, rows, *, whole=False, room=True):
        budget = super().budget(rows, whole=whole)
        is_open = hands_over(budget, self.least_chance)
        self.given.append(budget if is_open else 0)
        self.prices += [self.least_chance] * is_open
        return budget


def test_no_flapping_between_budgets_that_are_as_good():
    engine = SyntheticEngines(linear, lambda rows, now: 0.5, [tail(4, 1000)], noise=0.1)
    gate = Recorder()
    engine.run(gate, rounds=1)
    given = np.array(gate.given[200:])
    assert (np.diff(given) != 0).mean() < 0.1


def feed_until_a_trial(gate: AutoGate, **options) -> None:
    for _ in range(40):
        feed(gate, 1, seconds=1e-3, **options)
        if gate.is_trial:
            return
    pytest.fail("no trial in 40 steps")


def test_it_looks_before_it_drafts():
    gate = auto()
    feed_until_a_trial(gate)
    assert gate.least_chance > 1, "no token has such a chance"
    counters = gate.drain()
    assert counters["gate/trials"] == 1
    assert counters["gate/open_steps"] == counters["gate/open_trials"] == 0


def test_the_price_of_a_token_follows_its_time():
    def drafting(seconds) -> float:
        gate = Recorder()
        SyntheticEngines(seconds, lambda rows, now: 0.8, [tail(8, 400)]).run(gate, rounds=1)
        return float(np.mean(gate.prices))

    free, cheap, dear = (
        drafting(lambda rows, tokens, context, c=c: 1e-3 + c * tokens) for c in (0, 2e-5, 2e-4)
    )
    assert free < 0.15 < cheap < dear


def test_what_fills_steps_up_belongs_to_their_time():
    gate = auto()
    rows, ones = 4, np.ones(4, np.int32)
    verdicts = []
    for number in range(200):
        step = engine_step(number * 1_000_000, ones, 0 * ones, (10 + number) * ones)
        filled = step.verified._replace(filling=K * ones)
        told = np.zeros((4, len(CHANCES)))
        told[:3, 4], told[3, 4] = rows, 0.55 * rows  # each request has one token of chance 0.55
        offered = Offered(rows, told) if gate._budget else None
        gate.observe(step._replace(verified=filled, offered=offered))
        verdicts.append(gate.budget(rows, whole=True))
    assert set(verdicts[-50:]) == {K}


def feed(gate: AutoGate, steps: int, seconds: float, rows: int = 4, **changes) -> None:
    ones = np.ones(rows, np.int32)
    for _ in range(steps):
        feed.now += seconds
        feed.texts += 1
        seen = {
            "now_ns": int(feed.now * 1e9),
            "sampled": ones,
            "drafted": 0 * ones,
            "num_tokens": feed.texts * ones,
        }
        gate.observe(engine_step(**{**seen, **changes}))
        gate.budget(rows)


feed.now, feed.texts = 0.0, 10


@pytest.mark.parametrize(
    "changes",
    [
        {"same_batch": False},
        {"sampled": np.array([1, 1, 1, 0], np.int32)},  # one prompt is not computed yet
        {"num_tokens": np.full(4, 9_999, np.int32)},  # steps that the gate did not see
        {"now_ns": 1 << 60},  # a pause
    ],
    ids=["other requests", "prompt", "steps not seen", "pause"],
)
def test_steps_that_do_more_than_decode_are_left_out(changes):
    gate = auto()
    feed(gate, 50, seconds=1e-3)
    assert gate.drain()["gate/measured_steps"] > 0
    feed(gate, 1, seconds=1e-3, **changes)
    assert gate.drain()["gate/measured_steps"] == 0


def test_the_last_part_of_a_prompt_is_left_out():
    gate = auto()
    feed(gate, 50, seconds=1e-3)
    gate.drain()
    joined = np.array([1, 1, 1, 0], np.int32)
    feed(gate, 1, seconds=1.5e-3, sampled=joined, same_batch=False)
    feed(gate, 1, seconds=1.5e-3)
    assert gate.drain()["gate/measured_steps"] == 0
    feed(gate, 1, seconds=1e-3)
    assert gate.drain()["gate/measured_steps"] == 1


def test_a_lasting_change_of_speed_is_believed():
    gate = auto()
    feed(gate, 100, seconds=1e-3)
    feed(gate, 100, seconds=5e-3)
    gate.drain()
    feed(gate, 20, seconds=5e-3)
    counters = gate.drain()
    assert counters["gate/measured_s"] > 0
    assert counters["gate/predicted_s"] == pytest.approx(counters["gate/measured_s"], rel=0.1)


def test_what_is_drained_is_of_the_steps_since_and_adds_up_to_the_whole():
    engine = REGIMES["drafts pay in the tail only"]
    found = []

    class Drained(Recorder):
        def budget(self, rows, *, whole=False, room=True):
            budget = super().budget(rows, whole=whole)
            if rows % 5 == 0:
                found.append(self.drain())
            return budget

    whole, parts = auto(), Drained()
    for gate in (whole, parts):
        engine.run(gate, rounds=2)
    found.append(parts.drain())
    once = whole.drain()
    for name in once:
        assert sum(one[name] for one in found) == pytest.approx(once[name]), name
    assert parts.drain() == dict.fromkeys(once, 0)
    assert once["gate/open_steps"] == np.count_nonzero(parts.given)
    assert once["gate/predicted_s"] == pytest.approx(once["gate/measured_s"], rel=0.05)


def test_of_familiar_steps_some_are_looked_at():
    gate = auto()
    feed(gate, 200, seconds=1e-3, rows=16)
    gate.drain()
    feed(gate, 80, seconds=1e-3, rows=16)
    assert 20 <= gate.drain()["gate/measured_steps"] < 40
    few = auto()
    feed(few, 100, seconds=1e-3, rows=2)
    assert few.drain()["gate/measured_steps"] > 95


def test_a_trial_in_a_step_that_cannot_be_measured_is_booked_all_the_same():
    gate = auto()
    feed_until_a_trial(gate, rows=32)
    gate.drain()
    feed(gate, 1, seconds=2e-3, rows=32, same_batch=False)
    assert gate.drain()["gate/trial_loss_s"] > 0
