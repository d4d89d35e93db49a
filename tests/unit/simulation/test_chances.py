import dataclasses

import numpy as np
import pytest

from sam_rollout.bench.generator import Problem, group
from sam_rollout.bench.replay import Replay, replay
from sam_rollout.bench.sides import OWN, all_sides
from sam_rollout.simulation.chances import (
    Acceptance,
    Counts,
    count_replay,
    fit_from_right,
    right_drafts,
)

SIDE = next(side for side in all_sides() if side.name == OWN)


@pytest.fixture(scope="module")
def trace():
    return Problem(0, seed=5).response(0, 1_500)


def walked(right, k):
    """Verify steps and accepted drafts of a response in which every step drafts k tokens."""
    steps = accepted = 0
    j = 1
    while j < len(right) - 1:
        a = min(k, int(right[j]))
        steps, accepted, j = steps + 1, accepted + a, j + a + 1
    return steps, accepted


@pytest.mark.parametrize("k", [1, 3, 6])
def test_right_drafts_give_what_a_replay_gives(trace, k):
    """One count for all k: a short draft is the beginning of a long one.

    But for a few drafts: the drafter learns from what it offered, which is not the same.
    """
    (right,) = right_drafts([trace], SIDE, 6)
    booked = Replay()
    replay(SIDE.open(k, 1, 4_000), [trace], booked)
    assert walked(right, k) == pytest.approx((booked.steps, booked.accepted), rel=0.02)


def test_a_fit_recovers_what_was_counted(trace):
    (right,) = right_drafts([trace], SIDE, 3)
    table = fit_from_right([(len(trace.prompt), right)], [0], 3)
    steps, accepted = walked(right, 3)
    assert table.expected(3, 0) == pytest.approx(1 + accepted / steps)


def test_counting_a_replay_sees_every_step(trace):
    counts = Counts([0, 800], 3)
    count_replay(SIDE.open(3, 1, 4_000), [trace], counts, 3)
    booked = Replay()
    replay(SIDE.open(3, 1, 4_000), [trace], booked)
    assert counts.steps.sum() == booked.steps
    assert (counts.steps * np.arange(4)).sum() == booked.accepted


def test_empty_stretches_lean_on_the_others():
    counts = Counts([0, 100], 2)
    for _ in range(1_000):
        counts.add(5, 2)
    table = counts.fit()
    assert table.survival[1] == pytest.approx(table.survival[0])


def test_texts_read_together_draft_what_each_would_alone():
    """Others end before, with it or after; all they do is to teach the drafter a little."""
    traces = [
        dataclasses.replace(trace, response=trace.response[:size])
        for trace, size in zip(group(1, 6, 400), (30, 1, 400, 2, 30, 250), strict=True)
    ]
    together = right_drafts(traces, SIDE, 4)
    alone = [right_drafts([trace], SIDE, 4)[0] for trace in traces]
    assert [len(right) for right in together] == [len(trace.response) + 1 for trace in traces]
    assert (np.concatenate(together) != np.concatenate(alone)).mean() < 0.03
    assert max(right.max() for right in together) == 4


def test_tables_are_checked():
    with pytest.raises(ValueError, match="rise from 0"):
        Acceptance(np.array([1.0]), np.array([[0.5]]))
    with pytest.raises(ValueError, match=r"0\.\.1"):
        Acceptance(np.array([0.0]), np.array([[1.5]]))
