import dataclasses

import numpy as np
import pytest

from sam_rollout.gating import ThresholdGate
from sam_rollout.simulation.chances import Acceptance
from sam_rollout.simulation.costs import StepCosts
from sam_rollout.simulation.policies import gate_budget, measured_budget
from sam_rollout.simulation.rollout import Fleet, Setting, simulate


def drafting(threshold, k=3, acceptance=None, **options):
    return Setting(gate_budget(ThresholdGate(threshold, k)), acceptance, **options)


def test_the_baseline_takes_the_longest_chain_of_steps(make_round, flat_costs):
    """One at a time, two requests wait for each other: 9 and 19 decode steps after the prompts."""
    found = simulate(make_round([10, 20]), Fleet(1, 1), flat_costs, Setting(tail_threshold=1))
    assert found.rollout_s == pytest.approx(0.1 * (9 + 19))
    assert found.ends == pytest.approx([0.9, 2.8])
    assert found.tail_s == pytest.approx(1.9), "while one waits it is no tail"
    together = simulate(make_round([10, 20]), Fleet(1, 2), flat_costs, Setting(tail_threshold=1))
    assert together.rollout_s == pytest.approx(0.1 * 19)
    assert together.tail_s == pytest.approx(0.1 * 10)
    assert together.head_s == pytest.approx(0.1 * 9)


def test_a_gate_opens_at_its_threshold(make_round, flat_costs, always_right):
    """Nine steps of two requests, then ten tokens in verify steps of four."""
    setting = drafting(1, 3, always_right, tail_threshold=1)
    found = simulate(make_round([10, 20]), Fleet(1, 2), flat_costs, setting)
    assert found.rollout_s == pytest.approx(0.1 * 9 + 0.15 * 3)
    assert found.acceptance_length == 4


def test_exact_counts_say_what_is_accepted(make_round, flat_costs):
    """Known so far -> right drafts; k cuts them, and the end of the response does."""
    right = np.array([0, 2, 0, 0, 1, 3, 3, 3, 3, 3, 0], np.int8)
    setting = drafting(8, 2)
    found = simulate(make_round([10], right=[right]), Fleet(1, 4), flat_costs, setting)
    # 1 -> 4 -> 6 -> 9 -> 10
    assert found.rollout_s == pytest.approx(4 * 0.15)
    assert found.figures()["accepted"] == 2 + 1 + 2 + 2


def test_drafts_that_are_never_right_cost_their_verification(make_round, flat_costs):
    never = Acceptance(np.zeros(1), np.zeros((1, 4)))
    found = simulate(make_round([100]), Fleet(1, 4), flat_costs, drafting(8, 3, never))
    assert found.rollout_s == pytest.approx(99 * 0.15)


def test_a_leap_is_the_sum_of_its_steps(make_round):
    """Costs grow with the context; many steps at once cost what they cost one by one."""
    contexts = np.array([0.0, 10_000.0])
    seconds = np.array([[[0.1, 1.1]], [[0.1, 1.1]]])
    costs = StepCosts(np.ones(1), contexts, seconds)
    found = simulate(make_round([1_000], prompt=50), Fleet(1, 1), costs, Setting())
    known = np.arange(51, 1_050)
    assert found.rollout_s == pytest.approx(float((0.1 + known / 10_000).sum()), rel=1e-9)


def test_chances_are_met_on_average(make_round, flat_costs):
    chances = Acceptance(np.array([0.0, 500.0]), np.array([[0.2, 0.1, 0.0], [0.8, 0.6, 0.5]]))
    found = simulate(make_round([30_000]), Fleet(1, 1), flat_costs, drafting(8, 3, chances))
    assert found.acceptance_length == pytest.approx(1 + 0.8 + 0.6 + 0.5, abs=0.05)


def test_what_a_token_draws_does_not_depend_on_the_setting(make_round, flat_costs):
    """Common random numbers: with a better gate every response ends no later."""
    chances = Acceptance(np.zeros(1), np.array([[0.6, 0.3, 0.2]]))
    lengths = [300, 500, 800, 900]
    early = simulate(make_round(lengths), Fleet(1, 4), flat_costs, drafting(2, 3, chances))
    again = simulate(make_round(lengths), Fleet(1, 4), flat_costs, drafting(2, 3, chances))
    other = simulate(make_round(lengths), Fleet(1, 4), flat_costs, drafting(2, 3, chances), seed=1)
    assert (early.ends == again.ends).all()
    assert (early.ends != other.ends).any()


def test_prompts_take_time(make_round, flat_costs):
    costs = StepCosts(flat_costs.batches, flat_costs.contexts, flat_costs.seconds, 0.01)
    found = simulate(make_round([1, 1], prompt=20), Fleet(1, 2), costs, Setting())
    assert found.rollout_s == pytest.approx(40 * 0.01)


def test_a_budget_may_look_at_the_context(make_round, flat_costs, always_right):
    """The narrow interface of a gate: (running, context) -> k."""

    def long_texts(running, context):
        return 3 if context >= 1024 else 0

    setting = Setting(long_texts, always_right)
    found = simulate(make_round([2_000], prompt=24), Fleet(1, 1), flat_costs, setting)
    shut = found.figures()["steps"] - found.figures()["verify_steps"]
    assert 990 <= shut <= 1_260, "asked anew at least every 256 steps"


def test_the_measuring_gate_takes_what_makes_the_most_tokens_a_second(make_round):
    """A draft token costs 0.2 ms a request: with 40 % accepted it pays in small batches only."""
    batches, ks = np.array([1.0, 64.0]), np.arange(4)
    seconds = (10 + 0.2 * batches * ks[:, None])[..., None] / 1000
    costs = StepCosts(batches, np.zeros(1), seconds)
    chances = [Acceptance(np.zeros(1), 0.4 ** np.arange(1.0, k + 1)[None]) for k in (1, 2, 3)]
    gate = measured_budget(costs, chances)
    given = [gate(running, 0.0) for running in range(65)]
    assert given[0] == 0 and given[1] == 3 and given[64] == 0
    assert given[1:] == sorted(given[1:], reverse=True)
    limited = measured_budget(costs, chances, most=(4, 2, 2))
    assert [limited(running, 0.0) for running in (1, 2, 3, 4, 5)] == [3, 3, 1, 1, 0]
    round_ = make_round(np.linspace(50, 2000, 64).astype(int))

    def seconds_of(budget):
        setting = Setting(budget, chances[-1])
        return simulate(round_, Fleet(1, 64), costs, setting).rollout_s

    fixed = [seconds_of(gate_budget(ThresholdGate(2**i, k))) for i in range(7) for k in (1, 2, 3)]
    assert seconds_of(gate) < 1.01 * min(fixed)


def test_the_measuring_gate_looks_at_the_context():
    """Verify steps read long texts more often than once."""
    contexts = np.array([0.0, 10_000.0])
    costs = StepCosts(np.ones(1), contexts, np.array([[[0.1, 0.2]], [[0.1, 0.5]]]))
    gate = measured_budget(costs, [Acceptance(np.array([0.0, 20.0]), np.array([[0.0], [0.9]]))])
    assert [gate(1, context) for context in (10.0, 100.0, 9_000.0)] == [0, 1, 0]


def test_what_cannot_be_simulated_is_said(make_round, flat_costs, always_right):
    with pytest.raises(ValueError, match="at least one token"):
        simulate(make_round([0]), Fleet(1, 1), flat_costs, Setting())
    with pytest.raises(ValueError, match="costs end at 4 drafts"):
        simulate(make_round([9]), Fleet(1, 1), flat_costs, drafting(1, 8, always_right))
    with pytest.raises(ValueError, match="need acceptance"):
        simulate(make_round([9]), Fleet(1, 1), flat_costs, drafting(1))


def test_a_round_waits_for_the_last_response_of_the_one_before(make_round, flat_costs):
    """The second round begins when the longest response of the first has ended."""
    round_ = make_round([10, 30, 20, 5])
    two = dataclasses.replace(round_, turn=np.array([0, 0, 1, 1]))
    one = simulate(round_, Fleet(2, 2), flat_costs, Setting(tail_threshold=1))
    found = simulate(two, Fleet(2, 2), flat_costs, Setting(tail_threshold=1))
    assert one.rollout_s == pytest.approx(0.1 * 29)
    assert found.rollout_s == pytest.approx(0.1 * 29 + 0.1 * 19)
    assert found.ends == pytest.approx([0.9, 2.9, 2.9 + 1.9, 2.9 + 0.4])
    assert found.tail_s == pytest.approx(found.rollout_s), "one request an engine"
    assert found.mean_s == pytest.approx((0.1 * (9 + 29) + 0.1 * (19 + 4)) / 2)
    assert (np.diff(found.log[:, 0]) >= 0).all()


def test_every_turn_draws_numbers_of_its_own(make_round, flat_costs):
    """The same responses twice over: drafts that are accepted in one turn need not be in both."""
    chances = Acceptance(np.zeros(1), np.array([[0.5, 0.3, 0.2]]))
    setting = drafting(4, 3, chances)
    lengths = [300, 500]
    one = simulate(make_round(lengths), Fleet(1, 4), flat_costs, setting)
    twice = dataclasses.replace(make_round(lengths * 2), turn=np.array([0, 0, 1, 1]))
    two = simulate(twice, Fleet(1, 4), flat_costs, setting)
    assert (two.ends[:2] == one.ends).all(), "the first turn draws as a round of its own"
    assert (two.ends[2:] - one.rollout_s != one.ends).any()


def test_leaving_the_cost_table_is_said(make_round):
    batches, contexts = np.array([1.0, 2.0]), np.array([0.0, 100.0])
    costs = StepCosts(batches, contexts, np.full((2, 2, 2), 0.1))
    with pytest.warns(UserWarning, match="ends at 2 requests at once"):
        simulate(make_round([50] * 3), Fleet(1, 8), costs, Setting())
    with pytest.warns(UserWarning, match="ends at 100 tokens of context"):
        simulate(make_round([200]), Fleet(1, 8), costs, Setting())
