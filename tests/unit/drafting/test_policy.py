"""Choice of source, length of drafts, and the counts that both rest on."""

import numpy as np
import pytest

from sam_rollout.automaton.kernels import MATCH_CONFIRMED, MATCH_LENGTH, MATCH_WIDTH
from sam_rollout.config import SamConfig
from sam_rollout.drafting.policy import DraftPolicy

K = 8


def int32(*values):
    return np.array(values, np.int32)


def make_policy(policy="fixed", biases=(0,), least=0.1, max_rows=4, live=1):
    config = SamConfig(max_draft_tokens=K, draft_policy=policy, min_confidence=least)
    return DraftPolicy(config, list(biases), max_rows, live)


def plan(policy, lengths, budget=K, num_tokens=100):
    """k of each source, for one row; `lengths` are those of the sources' matches."""
    matches = np.zeros((len(lengths), 4, MATCH_WIDTH), np.int32)
    matches[:, 0, MATCH_LENGTH] = lengths
    k, chosen = policy.plan(matches, int32(num_tokens), int32(budget))
    assert chosen == (k[:, 0] > 0).tolist()
    return k[:, 0].tolist()


def observe(policy, draft, sampled, num_tokens=100, eligible=True):
    """The engine verified `draft` and sampled these tokens after the first `num_tokens`."""
    token_ids = np.zeros((1, num_tokens + len(sampled)), np.int32)
    token_ids[0, num_tokens:] = sampled
    tokens = np.zeros((1, K), np.int32)
    tokens[0, : len(draft)] = draft
    policy.observe(
        token_ids, int32(num_tokens + len(sampled)), np.array([eligible]), tokens, int32(len(draft))
    )


def test_of_live_sources_the_one_whose_drafts_are_accepted_wins():
    policy = make_policy(biases=(0, 0, 0), live=2)
    assert plan(policy, (3, 4, 0)) == [0, K, 0], "nothing is known yet: the longer match"
    for _ in range(20):
        if plan(policy, (3, 4, 0))[1]:
            observe(policy, [1] * K, [2, 2])  # siblings: nothing accepted
        else:
            observe(policy, [1] * K, [1, 1, 1, 2])  # own text: three tokens
    assert plan(policy, (3, 4, 0)) == [K, 0, 0]
    assert plan(policy, (0, 4, 0)) == [0, K, 0], "there is no other"
    assert plan(policy, (3, 4, 4)) == [K, 0, 0], "other sources go by length, as before"
    assert plan(policy, (3, 4, 5)) == [0, 0, K]


def test_a_source_that_is_alone_has_nobody_to_be_longer_than():
    policy = make_policy(biases=(5, 0), live=0)
    assert plan(policy, (2, 0)) == [K, 0]
    assert plan(policy, (2, 2)) == [K, 0], "others still have to be longer"
    assert plan(policy, (2, 3)) == [0, K]


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
    k = plan(make_policy(biases=(0, 0, 0, 5)), lengths)
    assert k == [K if source == winner else 0 for source in range(4)]


@pytest.mark.parametrize("budget", [-3, 0, 1, 5])
def test_the_budget_is_kept(budget):
    for policy in ("fixed", "confidence"):
        assert plan(make_policy(policy), [4], budget) == [max(budget, 0)]


@pytest.mark.parametrize(
    ("sampled", "drafted", "accepted"),
    [
        ([9], 3, 0),
        ([1, 9], 3, 1),
        ([1, 2, 9], 3, 2),
        ([1, 2, 3, 9], 3, 3),
        ([1, 2, 3, 1], 3, 3),
        ([1, 2], 1, 1),  # the engine verified one token, and then drew the second itself
        ([1], 0, 0),
    ],
)
def test_what_was_accepted_is_read_from_the_text(sampled, drafted, accepted):
    policy = make_policy()
    plan(policy, [4])
    observe(policy, [1, 2, 3], sampled)
    assert policy.totals.tolist() == [[drafted, accepted]]
    observe(policy, [1, 2, 3], sampled)
    assert policy.totals.tolist() == [[drafted, accepted]], "a draft is counted once"


def test_a_row_that_did_not_move_is_not_counted():
    policy = make_policy()
    plan(policy, [4])
    observe(policy, [1, 2, 3], [])
    observe(policy, [1, 2, 3], [1, 2, 9], eligible=False)
    assert policy.totals.tolist() == [[0, 0]]
    observe(policy, [1, 2, 3], [1, 2, 9])
    assert policy.totals.tolist() == [[3, 2]]


def test_drafts_in_flight_follow_their_request():
    policy = make_policy()
    matches = np.zeros((1, 4, MATCH_WIDTH), np.int32)
    matches[0, :2, MATCH_LENGTH] = 5
    policy.plan(matches, int32(10, 20), int32(K, K))
    policy.rearrange(np.array([1, -1, 0]))
    token_ids = np.zeros((3, 30), np.int32)
    token_ids[0, 20:23] = 1, 2, 9
    tokens = np.zeros((3, K), np.int32)
    tokens[[0, 2], :2] = 1, 2
    policy.observe(token_ids, int32(23, 23, 10), np.ones(3, bool), tokens, int32(2, 2, 2))
    assert policy.totals.tolist() == [[2, 2]], "row 1 is new, row 2 has not moved"


def trained(policy, lengths, accepted, times=400, draft=tuple(range(1, K + 1))):
    """Let a policy see drafts from the source with the longest match, each accepted so far."""
    for _ in range(times):
        k = max(plan(policy, lengths))
        kept = min(accepted, k)
        observe(policy, draft[:k], [*draft[:kept], 99])
    return policy


def test_without_experience_confidence_drafts_like_fixed():
    assert plan(make_policy("confidence"), [1]) == [K]


@pytest.mark.parametrize("accepted", [1, 3, K])
def test_drafts_become_as_long_as_what_is_accepted(accepted):
    assert plan(trained(make_policy("confidence"), [4], accepted), [4]) == [accepted]


def test_a_draft_has_one_token_at_least():
    assert plan(trained(make_policy("confidence"), [1], 0), [1]) == [1]


def test_fixed_learns_nothing():
    assert plan(trained(make_policy("fixed"), [1], 0), [1]) == [K]


def test_lengths_and_sources_are_learned_apart():
    policy = trained(make_policy("confidence", biases=(0, 0)), [1, 0], 0)
    assert plan(policy, [1, 0]) == [1, 0]
    assert plan(policy, [20, 0]) == [K, 0]
    assert plan(policy, [0, 1]) == [0, K]


def test_what_was_confirmed_is_learned_apart():
    policy = trained(make_policy("confidence"), [4], 0)
    matches = np.zeros((1, 4, MATCH_WIDTH), np.int32)
    matches[0, 0, MATCH_LENGTH] = 4
    matches[0, 0, MATCH_CONFIRMED] = 1
    for _ in range(400):
        k, _ = policy.plan(matches, int32(100), int32(K))
        draft = list(range(1, k[0, 0] + 1))
        observe(policy, draft, [*draft, 99])
    assert policy.plan(matches, int32(100), int32(K))[0][0, 0] == K
    k = plan(policy, [4])[0]
    observe(policy, list(range(1, k + 1)), [99])  # the last draft is a feature, too
    assert plan(policy, [4]) == [1]


def test_experience_is_forgotten():
    policy = trained(make_policy("confidence"), [1], 0, times=3000)
    assert plan(policy, [1]) == [1]
    assert plan(trained(policy, [1], K, times=9000), [1]) == [K]


def test_estimates_are_not_distorted_by_the_drafts_that_ended_early():
    """Tokens are accepted with probability 0.7 each: the chance falls below 0.2 after four."""
    rng = np.random.default_rng(0)
    policy = make_policy("confidence", least=0.2)
    for _ in range(6000):
        k = max(plan(policy, [4]))
        accepted = int((np.cumprod(rng.random(k) < 0.7)).sum())
        draft = list(range(1, k + 1))
        observe(policy, draft, [*draft[:accepted], 99])
    chosen = [max(plan(policy, [4])) for _ in range(20)]
    assert set(chosen) <= {3, 4, 5}
