"""Drafts bound late, in vLLM's asynchronous path on a CPU: the same texts, whatever happens.

Streams and events are stand-ins (`tests/emulated_device.py`); scheduler, runner, model and
drafter are the real ones. What stays to be shown on an accelerator is that a copy of tokens is
waited for.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.identity import identify
from sam_rollout.integrations.vllm.scheduling.late_binding import LateBinding
from sam_rollout.integrations.vllm.settings import engine_arguments
from tests.emulated_device import asynchronous_scheduling
from tests.integration.conftest import MODEL
from tests.integration.responses import generate, texts

COUPLED = RolloutSamplerConfig("coupled")
OFF = SamConfig(enabled=False)


def joined(k: int, gate: GateConfig, **options: Any) -> SamConfig:
    """Drafts of texts, and of the tiny model's head."""
    head = {"enabled": True, "path": f"{MODEL}_eagle3", "options": options}
    sam = SamConfig.from_mapping({"max_draft_tokens": k, "sources": {"model": head}})
    return dataclasses.replace(sam, gate=gate)


# Prepared ahead with up to 28 requests (k = 8), 64 (k = 3) or 128 (k = 1), bound with more.
SIDES = {
    "closed": SamConfig(gate=GateConfig("closed")),
    "opens and closes": SamConfig(gate=GateConfig("threshold", 24)),
    "k = 1": SamConfig(max_draft_tokens=1, gate=GateConfig("threshold", 10_000)),
    "k = 8": SamConfig(gate=GateConfig("threshold", 10_000)),
    "auto": SamConfig(gate=GateConfig("auto", exploration=0.1)),
    "joined, k = 3": joined(3, GateConfig("threshold", 24)),
    "joined, k = 8": joined(8, GateConfig("threshold", 10_000)),
    "joined, auto": joined(8, GateConfig("auto", exploration=0.1)),
    # vLLM asks it in steps alone in which no text is longer.
    "joined, short": joined(3, GateConfig("threshold", 24), max_model_len=128),
}
MAX_TOKENS = 150
SIBLINGS = 2
# As in test_coupled_sampler.py: requests are preempted, and no step holds the first prompt.
SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 14,
    "block_size": 128,
    "disable_log_stats": False,
}


@pytest.fixture(scope="module")
def asynchronous(make_engine) -> Any:
    """``asynchronous(sam, **arguments)``: an engine that schedules a step ahead."""

    def make(sam: SamConfig, **arguments: Any) -> Any:
        with asynchronous_scheduling():
            engine = make_engine(sam, **{**engine_arguments(sam, COUPLED), **arguments})
        core = engine.llm_engine.engine_core.engine_core
        expected = "LateBindingScheduler" if sam.enabled else "AsyncScheduler"
        assert type(core.scheduler).__name__ == expected
        return engine

    return make


@pytest.fixture(scope="module")
def plain(make_engine) -> Any:
    """Without drafts, scheduled synchronously."""
    return make_engine(OFF, **engine_arguments(OFF, COUPLED))


@pytest.fixture(scope="module")
def reference(plain, prompts) -> list[Any]:
    """Every response of the plain engine, at T = 1."""
    return generate(plain, prompts, SIBLINGS, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("name", SIDES)
def test_texts_are_those_without_drafts(name, asynchronous, reference, prompts):
    engine = asynchronous(SIDES[name], disable_log_stats=False)
    with pytest.MonkeyPatch.context() as patch:
        ways = _spied(patch, "_fill", "_bind", "_follow")
        outputs = generate(engine, prompts, SIBLINGS, max_tokens=MAX_TOKENS)
    assert texts(outputs) == texts(reference)
    # Prepared ahead, bound and without places.
    expected = {"_follow"} if name == "closed" else {"_fill", "_bind", "_follow"}
    assert set(ways) == expected
    report = engine.collective_rpc("sam_drain")[0]
    counters = report["counters"]
    assert counters["draft/failures"] == counters["draft/rebuilds"] == 0
    assert counters.get("draft/model_failures", 0) == 0
    assert (counters.get("draft/model_tokens", 0) > 0) == SIDES[name].drafts_with_model
    accepted = sum(book[2] for book in report["requests"].values())
    assert (accepted > 0) == (name != "closed")
    # Places that no draft was bound to are no drafts: vLLM counts what our ledger counts.
    kept = accepted + counters["draft/accepted_padding_tokens"]
    assert _counted(engine, "spec_decode_num_accepted_tokens") == kept


def _spied(patch: pytest.MonkeyPatch, *names: str) -> Counter[str]:
    """How often methods of late binding are called from here on."""
    counts: Counter[str] = Counter()

    def spy(name: str, method: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[name] += 1
            return method(*arguments, **options)

        return call

    for name in names:
        patch.setattr(LateBinding, name, spy(name, getattr(LateBinding, name)))
    return counts


def _counted(engine: Any, name: str) -> int:
    return sum(one.value for one in engine.get_metrics() if one.name == f"vllm:{name}")


def test_without_drafts_texts_are_the_same_asynchronously(asynchronous, reference, prompts):
    outputs = generate(asynchronous(OFF), prompts, SIBLINGS, max_tokens=MAX_TOKENS)
    assert texts(outputs) == texts(reference)


@pytest.mark.parametrize(
    "always",
    [
        pytest.param(SamConfig(max_draft_tokens=3, gate=GateConfig("threshold", 10_000)), id="on"),
        pytest.param(joined(3, GateConfig("threshold", 10_000)), id="joined"),
    ],
)
def test_texts_are_the_same_where_requests_are_preempted_and_prompts_computed_in_parts(
    always, asynchronous, reference, prompts
):
    engine = asynchronous(always, **SMALL)
    outputs = generate(engine, prompts, SIBLINGS, max_tokens=MAX_TOKENS)
    assert texts(outputs) == texts(reference)
    assert _counted(engine, "num_preemptions") > 0


def _rollout(engine: Any, prompts: list[list[int]], seed: int, aborts: bool) -> dict[str, Any]:
    """Requests that join a few at a time, some of which are aborted: token ids and why they end."""
    from vllm import SamplingParams, TokensPrompt

    chance = random.Random(seed)
    todo = [(number, sibling) for number in range(len(prompts)) for sibling in range(SIBLINGS)]
    penalties = [chance.choice([1.0, 1.0, 1.3]) for _ in todo]
    limits = [chance.randint(1, MAX_TOKENS) for _ in todo]
    least = [chance.choice([0, 0, 0, limit // 2]) for limit in limits]
    core, found, live, steps = engine.llm_engine, {}, [], 0
    names = [f"{seed}-{number}-{sibling}" for number, sibling in todo]
    joined = 0
    while joined < len(todo) or core.has_unfinished_requests():
        if steps % 3 == 0:
            for place in range(joined, min(joined + chance.randint(1, 4), len(todo))):
                number, sibling = todo[place]
                who = identify(prompts[number], seed=1, step=seed, sibling=sibling, split="train")
                parameters = SamplingParams(
                    max_tokens=limits[place],
                    repetition_penalty=penalties[place],
                    stop_token_ids=[7, 11, 13],
                    min_tokens=least[place],
                    extra_args=who.to_extra_args(),
                )
                prompt = TokensPrompt(prompt_token_ids=prompts[number])
                core.add_request(names[place], prompt, parameters)
                live.append(names[place])
                joined += 1
        if aborts and steps % 17 == 16 and live:
            core.abort_request([live.pop(chance.randrange(len(live)))])
        for output in core.step():
            if output.finished and output.request_id in live:
                live.remove(output.request_id)
                (one,) = output.outputs
                found[output.request_id] = list(one.token_ids), one.finish_reason
        steps += 1
    return found


@pytest.fixture(scope="module")
def one_by_one(plain, prompts) -> dict[str, Any]:
    return _rollout(plain, prompts, seed=3, aborts=False)


@pytest.mark.parametrize(
    "name", ["opens and closes", "k = 8", "auto", "joined, k = 3", "joined, k = 8"]
)
def test_texts_are_the_same_where_requests_come_and_go(name, asynchronous, one_by_one, prompts):
    engine, expected = asynchronous(SIDES[name], enable_prefix_caching=True), one_by_one
    found = _rollout(engine, prompts, seed=3, aborts=True)
    assert len(expected) == len(prompts) * SIBLINGS
    assert len(found) >= 0.8 * len(expected)
    assert found == {name: expected[name] for name in found}
    counters = engine.collective_rpc("sam_drain")[0]["counters"]
    assert counters["draft/failures"] == counters["gate/failures"] == 0


@pytest.mark.parametrize("name", ["k = 8", "joined, k = 8"])
def test_requests_with_a_grammar_get_no_drafts_and_others_do(name, asynchronous, plain, prompts):
    from vllm import SamplingParams, TokensPrompt
    from vllm.sampling_params import StructuredOutputsParams

    def responses(engine: Any) -> list[str]:
        asked, parameters = [], []
        for number, prompt in enumerate(prompts[:8]):
            grammar = StructuredOutputsParams(regex="(yes|no)[0-9]{20}") if number % 2 else None
            who = identify(prompt, seed=1, step=0, sibling=0, split="train")
            parameters.append(
                SamplingParams(
                    max_tokens=60, structured_outputs=grammar, extra_args=who.to_extra_args()
                )
            )
            asked.append(TokensPrompt(prompt_token_ids=prompt))
        outputs = engine.generate(asked, parameters, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]

    engine = asynchronous(SIDES[name])
    assert responses(engine) == responses(plain)
    books = engine.collective_rpc("sam_drain")[0]["requests"]
    drafted = [book[1] for _, book in sorted(books.items())]
    assert sum(count > 0 for count in drafted) == 4


def test_a_drafter_that_fails_with_a_step_on_its_way_ends_no_rollout(
    asynchronous, reference, prompts, caplog
):
    engine = asynchronous(SIDES["k = 8"])
    runner = engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    session = runner.model_runner.drafter.session
    observe, calls = session.drafter.observe, []

    def fail(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 40:
            raise RuntimeError("broken on purpose")
        return observe(*arguments)

    session.drafter.observe = fail
    outputs = generate(engine, prompts, SIBLINGS, max_tokens=MAX_TOKENS)
    assert texts(outputs) == texts(reference)
    assert engine.collective_rpc("sam_drain")[0]["counters"]["draft/failures"] == 1
    assert len(calls) == 40 and caplog.text.count("switched off") == 1
