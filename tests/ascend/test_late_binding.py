"""Drafts bound late in vllm-ascend's asynchronous path: the same texts, whatever happens."""

from __future__ import annotations

import pytest

from sam_rollout.config import SamConfig
from sam_rollout.integrations.vllm.scheduling.scheduler_choice import (
    SCHEDULER_CLASS,
    why_synchronous,
)
from sam_rollout.integrations.vllm.settings import engine_arguments
from tests.ascend.conftest import MODEL

SIDES = ("closed", "opens", "auto", "filled up", "preempted")


@pytest.fixture(scope="module")
def engines(answers):
    return answers["generate_ahead"]


@pytest.mark.parametrize("name", SIDES)
def test_texts_are_those_without_drafts(engines, name):
    """At temperature 1, against an engine that schedules synchronously."""
    engine = engines[name]
    assert engine["scheduler"] == "LateBindingScheduler" and engine["why_synchronous"] == ""
    assert engines["synchronous"]["scheduler"] != "AsyncScheduler"
    assert engine["together"] == engines["synchronous"]["together"]


@pytest.mark.parametrize("name", SIDES)
def test_texts_are_the_same_where_requests_come_and_go(engines, name):
    """With aborts, minimum lengths, penalties and grammars."""
    expected, found = engines["synchronous"]["one by one"], engines[name]["one by one"]
    assert 0.6 * len(expected) <= len(found) < len(expected)
    assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize("name", SIDES)
def test_steps_have_no_places_or_drafts_are_bound_to_them(engines, name):
    ways, counters = engines[name]["ways"], engines[name]["counters"]
    assert set(ways) == ({"_follow"} if name == "closed" else {"_follow", "_bind"})
    assert (engines[name]["accepted"] > 0) == (name != "closed")
    assert counters["draft/failures"] == counters["draft/rebuilds"] == 0
    # Places that no draft was bound to are no drafts: vLLM counts what our ledger counts.
    kept = engines[name]["accepted"] + counters["draft/accepted_padding_tokens"]
    assert engines[name]["statistics"]["vllm:spec_decode_num_accepted_tokens"] == kept


def test_requests_were_preempted(engines):
    assert engines["preempted"]["statistics"]["vllm:num_preemptions"] > 0


def configured(scheduling: str = "auto", **arguments):
    """The configuration of an engine as vLLM and vllm-ascend's platform complete it."""
    from vllm.engine.arg_utils import EngineArgs

    given = engine_arguments(SamConfig(scheduling=scheduling))
    given["additional_config"] |= arguments.pop("additional_config", {})
    return EngineArgs(
        model=MODEL, dtype="float32", enforce_eager=True, max_model_len=256, **given, **arguments
    ).create_engine_config()


def test_an_engine_schedules_a_step_ahead_unless_told_otherwise():
    scheduler = configured().scheduler_config
    assert scheduler.async_scheduling and scheduler.scheduler_cls == SCHEDULER_CLASS
    for config in (configured("sync"), configured(async_scheduling=False)):
        scheduler = config.scheduler_config
        assert not scheduler.async_scheduling and scheduler.scheduler_cls is None


def test_a_scheduler_or_a_worker_of_others_schedules_synchronously():
    for arguments, reason in (
        ({"additional_config": {"SLO_limits_for_dynamic_batch": 50}}, "another scheduler_cls"),
        ({"worker_cls": "vllm_ascend.xlite.xlite_worker.XliteWorker"}, "xlite"),
    ):
        config = configured(**arguments)
        assert not config.scheduler_config.async_scheduling
        assert config.scheduler_config.scheduler_cls != SCHEDULER_CLASS
        assert reason in why_synchronous(config, "0.23.0")
