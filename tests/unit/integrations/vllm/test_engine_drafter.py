"""Drafts of a model in an engine that schedules a step ahead: whose they are when they arrive."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam_rollout.integrations.vllm.model_drafts.engine_drafter import EngineDrafter
from sam_rollout.sources.model import ModelSourceConfig

DRAFTS = [[5, 6, 7], [8, 9, 10], [11, 12, 13]]


@pytest.fixture
def runner():
    """One whose drafter proposes the same in every step."""
    return SimpleNamespace(
        drafter=SimpleNamespace(),
        propose_draft_token_ids=lambda *_args: torch.tensor(DRAFTS),
        sample_tokens=None,
        num_spec_tokens=8,
    )


@pytest.fixture
def drafter(runner):
    config = ModelSourceConfig(enabled=True, path="head", max_tokens=2)
    return EngineDrafter(runner, config, passes=2, alone=True, drafted=None, ahead=True)


def propose(runner):
    step = SimpleNamespace(num_spec_tokens_to_schedule=8)
    return runner.propose_draft_token_ids(step, *[None] * 8)


def test_drafts_are_taken_when_they_have_arrived(runner, drafter):
    assert propose(runner) == [], "nothing is left to vLLM"
    made = drafter.launched()
    assert drafter.take() is None and drafter.launched() is None
    drafter.arrived(made, ["a", "b", "c"], np.array([1, 2, 3]), None, 3)
    tokens, chances = drafter.take()
    assert tokens.tolist() == [draft[:2] for draft in DRAFTS] and chances is None
    assert drafter.take() is None


def test_drafts_follow_their_requests_into_a_batch_that_has_changed(runner, drafter):
    propose(runner)
    # b has left, c and a have changed places, and another one stands between them.
    rows = np.array([2, -1, 0])
    drafter.arrived(drafter.launched(), ["a", "b", "c"], np.array([1, 2, 3]), rows, 3)
    tokens, _ = drafter.take()
    assert tokens.tolist() == [[11, 12], [-1, -1], [5, 6]]


def test_a_step_without_the_drafter_brings_nothing(drafter):
    drafter.arrived(None, ["a"], np.array([1]), np.array([0]), 1)
    assert drafter.take() is None
