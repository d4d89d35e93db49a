"""Choice of source, length of drafts, and the counts that both rest on."""

import numpy as np
import pytest

from sam_rollout.automaton.interface import MATCH_CONFIRMED, MATCH_LENGTH, MATCH_WIDTH
from sam_rollout.config import GateConfig, SamConfig
from sam_rollout.drafting.in_flight import NO_SOURCE
from sam_rollout.drafting.policy import DraftPolicy
from sam_rollout.sources import Source
from sam_rollout.verified import CHANCES, Verified
from tests.unit.drafting.texts import int32

K, MAX_ROWS = 8, 4


class _Source(Source):
    def __init__(self, bias, competes):
        self.bias, self.competes = bias, competes


class Policy(DraftPolicy):
    """A policy of one row and the drafts it has in flight."""

    def __init__(self, policy="fixed", biases=(0,), least=0.1, live=1, gate="threshold"):
        config = SamConfig(
            max_draft_tokens=K,
            draft_policy=policy,
            min_confidence=least,
            gate=GateConfig(kind=gate),
        )
        sources = [_Source(bias, number < live) for number, bias in enumerate(biases)]
        super().__init__(config, sources, MAX_ROWS)
        self.source = np.full(MAX_ROWS, NO_SOURCE, np.int32)
        self.drawn = self.handed_over = 0

    def k(self, lengths, budget=K, confirmed=0, price=0.0):
        """Tokens to hand over from each source; `lengths` are those of the sources' matches."""
        matches = np.zeros((len(lengths), MAX_ROWS, MATCH_WIDTH), np.int32)
        matches[:, 0, MATCH_LENGTH] = lengths
        matches[:, 0, MATCH_CONFIRMED] = confirmed
        k, chosen = self.plan(matches, int32(budget), self.source, price)
        assert chosen == (k[:, 0] > 0).tolist()
        assert self.source[0] == (chosen.index(True) if any(chosen) else NO_SOURCE)
        counts, held_back = k.sum(axis=0).astype(np.int32), int32(0)
        self.drawn = int(counts[0])
        self.hold_back(counts, held_back)
        self.handed_over = int(counts[0])
        assert self.handed_over + held_back[0] == self.drawn
        return [self.handed_over if drafts else 0 for drafts in chosen]

    def see(self, accepted):
        """The text goes on with so many tokens of the last draft; the engine verified it."""
        kept = min(accepted, self.handed_over)
        most = min(1 + kept, self.drawn)
        right = min(accepted, most)
        judged = right if right == most else self.drawn
        columns = 1 + kept, self.handed_over, kept, 0, self.source[0], judged, right
        self.verified = Verified(*map(int32, columns))
        self.learn(self.verified)


def test_of_live_sources_the_one_whose_drafts_are_accepted_wins():
    policy = Policy(biases=(0, 0, 0), live=2)
    assert policy.k((3, 4, 0)) == [0, K, 0], "nothing is known yet: the longer match"
    for _ in range(20):
        siblings = policy.k((3, 4, 0))[1]
        policy.see(0 if siblings else 3)
    assert policy.k((3, 4, 0)) == [K, 0, 0]
    assert policy.k((0, 4, 0)) == [0, K, 0], "there is no other"
    assert policy.k((3, 4, 4)) == [K, 0, 0], "other sources go by length, as before"
    assert policy.k((3, 4, 5)) == [0, 0, K]


def test_a_single_source_needs_no_longer_match_than_others():
    policy = Policy(biases=(5, 0), live=0)
    assert policy.k((2, 0)) == [K, 0]
    assert policy.k((2, 2)) == [K, 0], "others still have to be longer"
    assert policy.k((2, 3)) == [0, K]


@pytest.mark.parametrize(
    ("lengths", "winner"),
    [
        ((3, 3, 3, 3), 0),  # ties go to the first
        ((3, 4, 4, 4), 1),
        ((3, 3, 4, 9), 2),
        ((3, 3, 4, 10), 3),  # the last one needs more than five more
        ((0, 0, 0, 5), None),
        ((0, 0, 0, 6), 3),
        ((0, 0, 1, 0), 2),
        ((0, 0, 0, 0), None),
        ((7, 1, 1, 12), 0),
    ],
)
def test_the_longest_match_wins(lengths, winner):
    k = Policy(biases=(0, 0, 0, 5)).k(lengths)
    assert k == [K if source == winner else 0 for source in range(4)]


@pytest.mark.parametrize("budget", [-3, 0, 1, 5])
def test_the_budget_is_kept(budget):
    for policy in ("fixed", "confidence"):
        assert Policy(policy).k([4], budget) == [max(budget, 0)]


def trained(policy, lengths, accepted, times=400, **match):
    """Let a policy see drafts from the source with the longest match, each accepted so far."""
    for _ in range(times):
        policy.k(lengths, **match)
        policy.see(accepted)
    return policy


@pytest.mark.parametrize(
    ("policy", "times", "accepted", "k"),
    [
        ("confidence", 0, 0, K),  # without experience like fixed
        ("confidence", 400, 0, 0),
        ("confidence", 400, 1, 1),
        ("confidence", 400, 3, 3),
        ("confidence", 400, K, K),
        ("fixed", 400, 0, K),  # learns nothing
    ],
)
def test_drafts_become_as_long_as_what_is_accepted(policy, times, accepted, k):
    assert trained(Policy(policy), [4], accepted, times).k([4]) == [k]


def test_a_price_ends_drafts_as_a_least_confidence_does():
    """Two of three drafts have one right token, the third has all."""
    both = Policy(gate="auto"), Policy("confidence", least=0.5)
    for policy in both:
        for number in range(300):
            policy.k([4])
            policy.see(K if number % 3 == 0 else 1)
    assert both[0].k([4], price=0.5) == both[1].k([4]) == [1]
    assert both[0].k([4], price=0.1) == [K]
    assert both[1].k([4], price=0.1) == [1], "the higher of the two"
    assert both[0].k([4], price=2.0) == [0] and both[0].drawn == 1


def test_what_is_held_back_is_learned_from():
    """Nothing is handed over, and chances follow what the text does."""
    policy = trained(Policy(gate="auto"), [4], 0, price=2.0)
    assert policy.k([4], price=0.2) == [0]
    trained(policy, [4], 1, times=6000, price=2.0)
    assert policy.k([4], price=0.9)[0] >= 1


def test_offers_are_told_by_chance():
    policy = trained(Policy(gate="auto"), [4], 2)
    policy.k([4], price=0.5)
    assert policy.handed_over == 2
    policy.see(2)
    rows, tokens = policy.offered(policy.verified)
    assert rows == 1 and tokens[0].sum() == K
    assert tokens[0, : CHANCES.index(0.8) + 1].sum() == 2, "two that are sure"
    assert tokens[1].sum() == 3 and tokens[2].sum() == 2, "the one held back was judged"
    assert 1.5 < tokens[3].sum() < 2.2
    policy.k([4], budget=0)
    policy.see(0)
    assert policy.offered(policy.verified)[0] == 0, "it was not allowed any"
    assert Policy().offered(policy.verified) is None, "nobody asks"


def test_lengths_and_sources_are_learned_apart():
    policy = trained(Policy("confidence", biases=(0, 0)), [1, 0], 0)
    assert policy.k([1, 0]) == [0, 0]
    assert policy.k([20, 0]) == [K, 0]
    assert policy.k([0, 1]) == [0, K]


def test_what_was_confirmed_is_learned_apart():
    policy = trained(Policy("confidence"), [4], 0)
    trained(policy, [4], K, confirmed=1)
    assert policy.k([4], confirmed=1) == [K]
    policy.k([4])
    policy.see(0)  # the last draft is a feature, too
    assert policy.k([4]) == [0]


def test_experience_is_forgotten():
    policy = trained(Policy("confidence"), [1], 0, times=3000)
    assert policy.k([1]) == [0]
    assert trained(policy, [1], K, times=9000).k([1]) == [K]


def test_estimates_are_not_distorted_by_the_drafts_that_ended_early():
    """Tokens are accepted with probability 0.7 each: the chance falls below 0.2 after four."""
    rng = np.random.default_rng(0)
    policy = Policy("confidence", least=0.2)
    for _ in range(6000):
        k = max(policy.k([4]))
        policy.see(int((np.cumprod(rng.random(k) < 0.7)).sum()))
    chosen = [max(policy.k([4])) for _ in range(20)]
    assert set(chosen) <= {3, 4, 5}
