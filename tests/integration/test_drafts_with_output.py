"""Drafts that come with a step's output: the same texts, and nobody asks the worker for them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.identity import identify
from sam_rollout.integrations.vllm.settings import engine_arguments
from tests.integration.responses import generate

COUPLED = RolloutSamplerConfig("coupled")
OFF = SamConfig(enabled=False)
ALWAYS = GateConfig("threshold", 10_000)
SIDES = {
    "closed": SamConfig(gate=GateConfig("closed")),
    "k = 1": SamConfig(max_draft_tokens=1, gate=ALWAYS),
    "k = 8": SamConfig(gate=ALWAYS),
    "auto": SamConfig(gate=GateConfig("auto", exploration=0.1)),
}


@pytest.fixture(scope="module")
def start(make_engine) -> Any:
    """``start(sam)``: an engine with the coupled sampler, and its executor that counts."""

    def make(sam: SamConfig, **arguments: Any) -> tuple[Any, list[None]]:
        engine = make_engine(sam, **{**engine_arguments(sam, COUPLED), **arguments})
        executor, fetched = _core(engine).model_executor, []
        take = executor.take_draft_token_ids

        def counted() -> Any:
            fetched.append(None)
            return take()

        executor.take_draft_token_ids = counted
        return engine, fetched

    return make


@pytest.fixture(scope="module")
def reference(start, prompts) -> dict[str, list[int]]:
    return _rollout(start(OFF)[0], prompts, aborts=False)


def _core(engine: Any) -> Any:
    return engine.llm_engine.engine_core.engine_core


def _rollout(engine: Any, prompts: list[list[int]], *, aborts: bool) -> dict[str, list[int]]:
    """Requests that join a few at a time, some with a grammar; tokens of those not aborted."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    core, chance, found, joined, steps = engine.llm_engine, random.Random(5), {}, [], 0
    while len(joined) < len(prompts) or core.has_unfinished_requests():
        if steps % 4 == 0:
            for number in range(len(joined), min(len(joined) + 5, len(prompts))):
                regex = "((yes|no) ){20}" if number % 4 == 1 else None
                who = identify(prompts[number], seed=1, step=0, sibling=0, split="train")
                parameters = SamplingParams(
                    max_tokens=20 + 3 * number,
                    structured_outputs=regex and StructuredOutputsParams(regex=regex),
                    extra_args=who.to_extra_args(),
                )
                joined.append(str(number))
                prompt = TokensPrompt(prompt_token_ids=prompts[number])
                core.add_request(joined[-1], prompt, parameters)
        if aborts and steps % 9 == 8:
            core.abort_request([chance.choice(joined)])  # may have ended
        for output in core.step():
            if output.finished and output.outputs[0].finish_reason != "abort":
                found[output.request_id] = list(output.outputs[0].token_ids)
        steps += 1
    return found


@pytest.mark.parametrize("name", SIDES)
def test_texts_are_those_without_drafts_and_nobody_asks_for_drafts(name, start, reference, prompts):
    engine, fetched = start(SIDES[name])
    scheduler = _core(engine).scheduler
    update, told = scheduler.update_draft_token_ids, []
    scheduler.update_draft_token_ids = lambda drafts: (told.append(drafts), update(drafts))
    found = _rollout(engine, prompts, aborts=True)
    assert len(reference) == len(prompts)
    assert 0.6 * len(reference) <= len(found) < len(reference)
    assert found == {number: reference[number] for number in found}
    report = engine.collective_rpc("sam_drain")[0]
    assert report["counters"]["draft/failures"] == 0
    accepted = {name.partition("-")[0]: book[2] for name, book in report["requests"].items()}
    with_grammar = [count for number, count in accepted.items() if int(number) % 4 == 1]
    drafts = name != "closed"
    assert any(accepted.values()) == any(with_grammar) == bool(told) == drafts
    assert not fetched


def test_the_scheduler_has_the_drafts_of_the_last_step_and_no_others(start, prompts):
    config = SamConfig(gate=GateConfig("threshold", 6))
    engine, _ = start(config, disable_log_stats=False)
    generate(engine, prompts[:12], max_tokens=[30 + 5 * number for number in range(12)])
    report = engine.collective_rpc("sam_drain")[0]
    opened = report["steps"]["gate_open"]
    assert 0 < sum(opened) < len(opened)
    (counted,) = (
        one.value for one in engine.get_metrics() if one.name == "vllm:spec_decode_num_draft_tokens"
    )
    assert counted == sum(book[1] for book in report["requests"].values()) > 0


def test_what_does_not_come_is_asked_for(start, reference, prompts):
    engine, fetched = start(SIDES["k = 8"])
    drafter = _core(engine).model_executor.driver_worker.worker.model_runner.drafter
    drafter._with_output.detach()
    drafter._with_output = None
    assert _rollout(engine, prompts, aborts=False) == reference
    report = engine.collective_rpc("sam_drain")[0]
    assert len(fetched) == len(report["steps"]["gate_open"])
    assert any(book[2] for book in report["requests"].values())
