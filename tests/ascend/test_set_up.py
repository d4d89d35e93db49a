"""Tests configurations of vllm-ascend's engines without starting an engine."""

import copy
from types import SimpleNamespace

import pytest
import torch

from sam_rollout.config import ConfigError, SamConfig
from sam_rollout.integrations.vllm.drafting.proposer import SamProposer
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from sam_rollout.integrations.vllm.scheduling.scheduler_choice import (
    SCHEDULER_CLASS,
    SYNC_SCHEDULER_CLASS,
    why_synchronous,
)
from sam_rollout.integrations.vllm_ascend.model_drafts import AscendEngineDrafter
from tests.ascend.conftest import MODEL

HEAD = f"{MODEL}_eagle3"
WITH_HEAD = SamConfig.from_mapping({"sources": {"model": {"enabled": True, "path": HEAD}}})


def configured(sam: SamConfig = SamConfig(), additional=None, **arguments):  # noqa: B008
    """Return an engine's configuration, completed by vLLM and vllm-ascend's platform."""
    from vllm.engine.arg_utils import EngineArgs

    given = engine_arguments(sam)
    given["additional_config"] |= additional or {}
    return EngineArgs(
        model=MODEL, dtype="float32", enforce_eager=True, max_model_len=256, **given, **arguments
    ).create_engine_config()


def test_an_engine_schedules_a_step_ahead_unless_told_otherwise():
    scheduler = configured().scheduler_config
    assert scheduler.async_scheduling and scheduler.scheduler_cls == SCHEDULER_CLASS
    for config in (configured(SamConfig(scheduling="sync")), configured(async_scheduling=False)):
        scheduler = config.scheduler_config
        assert not scheduler.async_scheduling and scheduler.scheduler_cls is None


def test_a_scheduler_or_a_worker_of_others_schedules_synchronously():
    for arguments, reason in (
        ({"additional": {"SLO_limits_for_dynamic_batch": 50}}, "another scheduler_cls"),
        ({"worker_cls": "vllm_ascend.xlite.xlite_worker.XliteWorker"}, "xlite"),
    ):
        config = configured(**arguments)
        assert not config.scheduler_config.async_scheduling
        assert config.scheduler_config.scheduler_cls != SCHEDULER_CLASS
        assert reason in why_synchronous(config, "0.23.0")


def test_an_engine_with_a_head_schedules_synchronously_whatever_was_asked_for():
    for asked in (None, True):
        scheduler = configured(WITH_HEAD, async_scheduling=asked).scheduler_config
        assert not scheduler.async_scheduling and scheduler.scheduler_cls == SYNC_SCHEDULER_CLASS


@pytest.fixture
def proposer_class(vllm_config):
    # Modules of vllm-ascend import each other in a circle, so this import has to be the first.
    import vllm_ascend.worker.model_runner_v1  # noqa: F401
    from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer

    return AscendSpecDecodeBaseProposer


def loaded(vllm_config, **head):
    config = copy.copy(vllm_config)
    config.additional_config = engine_arguments(WITH_HEAD)["additional_config"]
    inner = SimpleNamespace(embed_tokens=SimpleNamespace(weight=None))
    policy = SimpleNamespace(lm_head="policy's", model=SimpleNamespace(embed_tokens="policy's"))
    model = SimpleNamespace(model=inner, lm_head="own", **head)
    drafter = SimpleNamespace(
        vllm_config=config, method="eagle3", model=model, use_cuda_graph=False, use_compress=False
    )
    return drafter, policy


def test_a_heads_own_output_layer_stays(proposer_class, vllm_config):
    drafter, policy = loaded(vllm_config, has_own_lm_head=True)
    proposer_class._maybe_share_lm_head(drafter, policy)
    assert drafter.model.lm_head == "own"


def test_upstream_still_leaves_a_head_without_an_output_layer(proposer_class, vllm_config):
    """If this test fails, ``_sharing_output_layer`` can be removed."""
    drafter, policy = loaded(vllm_config, has_own_lm_head=False)
    proposer_class._maybe_share_lm_head.__wrapped__(drafter, policy)
    assert drafter.model.lm_head == "own"


def runner_with(*, captured=False, positions=256):
    """Return the parts of a runner that our drafter reads at its start."""
    drafter = SimpleNamespace(
        _run_merged_draft=len, _runnable=max if captured else len, parallel_drafting=False
    )
    return SimpleNamespace(
        drafter=drafter,
        speculative_config=SimpleNamespace(
            draft_model_config=SimpleNamespace(max_model_len=positions)
        ),
        model_config=SimpleNamespace(max_model_len=256),
    )


def test_a_head_with_too_few_positions_is_refused():
    runner, config = runner_with(positions=128), WITH_HEAD.sources.model
    with pytest.raises(ConfigError, match=r"path = .*: knows 128 positions"):
        AscendEngineDrafter(runner, config, passes=3, alone=True, drafted=None)


def test_captured_passes_are_left_as_they_are():
    runner = runner_with(captured=True)
    runner.propose_draft_token_ids = lambda *_args: torch.tensor([[5, 6, 7, 8]])
    runner.sample_tokens = None
    config = WITH_HEAD.sources.model
    drafter = AscendEngineDrafter(runner, config, passes=3, alone=True, drafted=None)
    assert runner.propose_draft_token_ids([[1]], None, SimpleNamespace(), None) == []
    tokens, chances = drafter.take()
    assert tokens.tolist() == [[5, 6, 7]] and chances is None


def test_an_engine_that_schedules_a_step_ahead_after_all_is_refused(vllm_config):
    config = copy.copy(vllm_config)
    config.additional_config = engine_arguments(WITH_HEAD)["additional_config"]
    config.speculative_config = SimpleNamespace(num_speculative_tokens=WITH_HEAD.max_draft_tokens)
    proposer = SamProposer(config)
    with pytest.raises(ConfigError, match="async_scheduling"):
        proposer.bind(
            SimpleNamespace(use_async_scheduling=True), drafts_are_used=True, record=False
        )
