"""Gates that vary the number of draft tokens, in vLLM on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.settings import engine_arguments
from tests.integration.responses import generate, texts

SIBLINGS, MAX_TOKENS, K = 2, 120, 8
SIDES = {
    "off": SamConfig(enabled=False),
    "auto": SamConfig(max_draft_tokens=K, gate=GateConfig(kind="auto")),
    "schedule": SamConfig(
        max_draft_tokens=K, gate=GateConfig(kind="schedule", schedule={4: 8, 8: 0, 16: 2})
    ),
}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def engines(make_engine) -> dict[str, Any]:
    coupled = RolloutSamplerConfig("coupled")
    return {name: make_engine(sam, **engine_arguments(sam, coupled)) for name, sam in SIDES.items()}


def rollout(engine: Any, prompts: list[list[int]], step: int) -> list[list[int]]:
    """Responses of different lengths, so that the batch shrinks from 24 requests to one."""
    requests = 12 * SIBLINGS
    lengths = [MAX_TOKENS * (1 + number) // requests for number in range(requests)]
    outputs = generate(
        engine, prompts[:12], SIBLINGS, step=step, max_tokens=lengths, ignore_eos=True
    )
    return texts(outputs)


@pytest.fixture(scope="module")
def rollouts(engines, prompts) -> dict[str, list[list[list[int]]]]:
    """Three rollouts of every side."""
    return {
        name: [rollout(engine, prompts, step) for step in range(3)]
        for name, engine in engines.items()
    }


@pytest.mark.parametrize("side", ["auto", "schedule"])
def test_texts_do_not_depend_on_what_a_gate_decides(rollouts, side):
    assert rollouts[side] == rollouts["off"]


def test_the_measuring_gate_sees_every_step_of_the_engine(engines, rollouts):
    engine = engines["auto"]
    # With asynchronous scheduling the time between two calls would not be that of a step.
    assert not engine.llm_engine.vllm_config.scheduler_config.async_scheduling
    drained = engine.collective_rpc("sam_drain")[0]
    counters = drained["counters"]
    seen = counters["gate/measured_steps"] + counters["gate/left_out_steps"]
    chosen = sum(counters[f"gate/steps_with_k_{k}"] for k in range(K + 1))
    assert seen + counters["gate/skipped_steps"] == counters["draft/drafter_steps"] == chosen
    assert counters["gate/measured_steps"] > 0.5 * seen
    assert counters["gate/failures"] == 0
    tokens = sum(len(text) for texts_of_step in rollouts["auto"] for text in texts_of_step)
    assert 0 < counters["gate/measured_tokens"] < tokens
    first, last = drained["steps"]["noted_s"][0], drained["steps"]["noted_s"][-1]
    assert 0 < counters["gate/measured_s"] < last - first


def test_a_schedule_drafts_by_the_number_of_requests(engines, rollouts):
    drained = engines["schedule"].collective_rpc("sam_drain")[0]
    assert set(drained["steps"]["gate_open"]) == {True, False}
    assert sum(totals[1] for totals in drained["requests"].values()) > 0
