"""Checks that drafts do not change texts.

Each side is an engine with the coupled sampler at temperature 1 on the tiny model. Its texts have
to be equal to the texts of an engine without drafts. Sides with ``ahead=True`` run in vLLM's
asynchronous path with emulated streams and events (`tests/emulated_device.py`). Log-probabilities
are compared, too.
"""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from sam_rollout.integrations.vllm.scheduling.late_binding import LateBinding
from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders
from sam_rollout.integrations.vllm.trees.cpu_attention import CpuTreeAttention
from sam_rollout.integrations.vllm.trees.step_trees import StepTrees, TreeKeeper
from sam_rollout.session.session import shapes_of
from tests.emulated_device import asynchronous_scheduling
from tests.integration.conftest import MODEL
from tests.integration.engines import FORCED_PROPOSER
from tests.integration.responses import (
    come_and_go,
    core_of,
    counted,
    drafts,
    failing,
    generate,
    proposer_of,
    requests,
    session_of,
    spied,
    texts,
)

OFF = SamConfig(enabled=False)
SIBLINGS, LONGEST = 2, 150
ALWAYS, CLOSED = GateConfig("threshold", 10_000), GateConfig("closed")
AUTO = GateConfig("auto", exploration=0.1)
# The 10 usable blocks are enough for eight prompts, but too few for eight responses.
SMALL = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "num_gpu_blocks_override": 11,
    "block_size": 128,
}


@dataclass(frozen=True)
class Side:
    sam: SamConfig
    ahead: bool = False
    engine: dict[str, Any] = field(default_factory=dict)
    sampler: str = "coupled"


def joined(k: int, gate: GateConfig, **options: Any) -> SamConfig:
    head = {"enabled": True, "path": f"{MODEL}_eagle3", "options": options}
    sam = SamConfig.from_mapping({"max_draft_tokens": k, "sources": {"model": head}})
    return dataclasses.replace(sam, gate=gate)


SCHEDULE = GateConfig(kind="schedule", schedule={4: 8, 8: 0, 16: 2})
FILLED_UP = SamConfig(max_draft_tokens=3, gate=GateConfig("threshold", 2), pad_drafts="always")
TREES = SamConfig(max_draft_tokens=12, draft_shape="tree", gate=ALWAYS)
FORCED = {"method": "custom_class", "model": FORCED_PROPOSER, "num_speculative_tokens": 3}
SIDES = {
    "closed": Side(SamConfig(gate=CLOSED)),
    "opens": Side(SamConfig(max_draft_tokens=3, gate=GateConfig("threshold", 16))),
    "k = 1": Side(SamConfig(max_draft_tokens=1, gate=ALWAYS)),
    "k = 8": Side(SamConfig(gate=ALWAYS)),
    "auto": Side(SamConfig(gate=AUTO, draft_shape="auto")),
    "schedule": Side(SamConfig(gate=SCHEDULE)),
    "filled up": Side(FILLED_UP),
    "preempted": Side(SamConfig(max_draft_tokens=3, gate=ALWAYS), engine=SMALL),
    "tree": Side(TREES),
    "trees of a few requests": Side(dataclasses.replace(TREES, gate=GateConfig("threshold", 16))),
    "tree, auto": Side(dataclasses.replace(TREES, gate=AUTO)),
    "tree, waits": Side(TREES, engine=SMALL | {"enable_prefix_caching": True}),
    "tree, head": Side(dataclasses.replace(joined(8, ALWAYS), draft_shape="tree")),
    "tree, preempted": Side(TREES, engine=SMALL | {"max_num_batched_tokens": 256}),
    "ahead, closed": Side(SamConfig(gate=CLOSED), ahead=True),
    "ahead, opens": Side(
        SamConfig(draft_shape="tree", gate=GateConfig("threshold", 24)), ahead=True
    ),
    "ahead, k = 8": Side(SamConfig(gate=ALWAYS), ahead=True),
    "ahead, auto": Side(SamConfig(gate=AUTO, draft_shape="auto"), ahead=True),
    "ahead, head, k = 3": Side(joined(3, GateConfig("threshold", 24)), ahead=True),
    "ahead, head, k = 8": Side(joined(8, ALWAYS), ahead=True),
    "ahead, short head": Side(joined(3, GateConfig("threshold", 24), max_model_len=128), True),
    "ahead, head, preempted": Side(joined(3, ALWAYS), ahead=True, engine=SMALL),
}


@pytest.fixture(scope="module")
def prompts(prompts) -> list[list[int]]:
    return prompts[:16]


@pytest.fixture(scope="module")
def start(make_engine) -> Callable[[Side], Any]:
    def make(side: Side) -> Any:
        arguments = {
            **engine_arguments(side.sam, RolloutSamplerConfig(side.sampler)),
            "disable_log_stats": False,
            "enable_prefix_caching": side.ahead,
            **side.engine,
        }
        if not side.ahead:
            return make_engine(side.sam, **arguments)
        with asynchronous_scheduling():
            engine = make_engine(side.sam, **arguments)
        expected = "LateBindingScheduler" if side.sam.enabled else "AsyncScheduler"
        assert type(core_of(engine).scheduler).__name__ == expected
        return engine

    return make


@pytest.fixture(scope="module")
def engine_of(start) -> Callable[[str], Any]:
    made: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in made:
            made[name] = start(SIDES[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def plain(start) -> Any:
    return start(Side(OFF))


def rollout(engine: Any, prompts: list[list[int]], first: int = 0) -> list[list[int]]:
    """Return responses, of different lengths, to the prompts from index `first` on."""
    limits = lengths(prompts)[first * SIBLINGS :]
    return texts(generate(engine, prompts[first:], SIBLINGS, max_tokens=limits))


def lengths(prompts: list[list[int]]) -> list[int]:
    count = len(prompts) * SIBLINGS
    return [LONGEST * (count + 3 * number) // (4 * count) for number in range(count)]


@pytest.fixture(scope="module")
def reference(plain, prompts) -> list[list[int]]:
    return rollout(plain, prompts)


@pytest.fixture(scope="module")
def one_by_one(plain, prompts) -> dict[str, list[int]]:
    return come_and_go(plain, prompts, longest=LONGEST)


@pytest.mark.parametrize("name", SIDES)
def test_texts_are_those_without_drafts(name, engine_of, reference, prompts):
    side, engine = SIDES[name], engine_of(name)
    first = len(prompts) // 2 if "max_num_seqs" in side.engine else 0
    with pytest.MonkeyPatch.context() as patch:
        ways = spied(patch, LateBinding, "_fill", "_bind", "_follow")
        fetched = spied(patch, core_of(engine).model_executor, "take_draft_token_ids")
        assert rollout(engine, prompts, first) == reference[first * SIBLINGS :]
    (report,) = engine.collective_rpc("sam_drain")
    counters, opened = report["counters"], set(report["steps"]["gate_open"])
    assert counters["draft/failures"] == counters["draft/rebuilds"] == 0
    assert counters.get("draft/model_failures", 0) == 0
    assert (counters.get("draft/model_tokens", 0) > 0) == side.sam.drafts_with_model
    drafted, accepted = drafts(report)
    draws = counters.get("draft/draws_positions", 0)
    assert (draws > 0) == (drafted > 0 and side.sam.sources.draws.enabled)
    assert 0 < accepted < drafted if "closed" not in name else drafted == 0
    if side.sam.gate == CLOSED:
        assert opened == {False}
    elif side.sam.gate != ALWAYS:
        assert opened == {False, True}
    shapes = session_of(engine).drafter.shapes
    assert shapes == (("chain",) if side.ahead else shapes_of(side.sam))
    asks_in_vain = side.ahead and side.sam.draft_shape != "chain"
    reason = "trees are not bound late so far" if asks_in_vain else ""
    assert proposer_of(engine).describe()["why_no_trees"] == reason
    if len(shapes) > 1:
        assert {False, True} == set(report["steps"]["draft_trees"])
        assert counters["gate/tree_steps"] > 0
    assert (counted(engine, "num_preemptions") > 0) == ("preempted" in name)
    # vLLM also counts padding tokens as drafts.
    kept = accepted + counters["draft/accepted_padding_tokens"]
    counted_by_vllm = counted(engine, "spec_decode_num_accepted_tokens")
    if "waits" in name:  # we do not count drafts that wait for room in a step
        assert kept <= counted_by_vllm < 1.1 * kept
        return
    assert counted_by_vllm == kept
    if side.ahead:  # `_fill` and `_bind` write drafts; `_follow` appends to texts
        assert set(ways) == ({"_follow"} if "closed" in name else {"_fill", "_bind", "_follow"})
    else:
        filled = counters["draft/padding_tokens"]
        assert counted(engine, "spec_decode_num_draft_tokens") == drafted + filled
        assert (filled > 0) == (side.sam == FILLED_UP)
        assert not fetched, "drafts come with a step's output"


@pytest.mark.parametrize("name", [name for name in SIDES if "closed" not in name])
def test_texts_are_the_same_where_requests_come_and_go(name, engine_of, one_by_one, prompts):
    engine = engine_of(name)
    found = come_and_go(engine, prompts, longest=LONGEST, aborts=True)
    assert len(one_by_one) == len(prompts)
    assert 0.6 * len(prompts) <= len(found) < len(prompts)
    assert found == {number: one_by_one[number] for number in found}
    counters = engine.collective_rpc("sam_drain")[0]["counters"]
    assert counters["draft/failures"] == 0


@pytest.mark.parametrize("name", ["k = 8", "tree", "ahead, k = 8"])
def test_an_interrupted_response_goes_on_as_if_it_had_not_been(name, engine_of, reference, prompts):
    engine, chance = engine_of(name), random.Random(5)
    asked, parameters = requests(prompts, SIBLINGS, max_tokens=lengths(prompts))
    said: list[list[int]] = [[] for _ in asked]
    going, interruptions = list(range(len(asked))), 10
    while going:
        now = [parameters[number].clone() for number in going]
        for number, one in zip(going, now, strict=True):
            one.max_tokens -= len(said[number])
            if interruptions:
                one.max_tokens = chance.randint(1, one.max_tokens)
        texts_so_far = [
            {"prompt_token_ids": asked[number]["prompt_token_ids"] + said[number]}
            for number in going
        ]
        outputs = engine.generate(texts_so_far, now, use_tqdm=False)
        interruptions = max(interruptions - 1, 0)
        for number, output in zip(list(going), outputs, strict=True):
            (one,) = output.outputs
            said[number] += one.token_ids
            full = len(said[number]) == parameters[number].max_tokens
            if one.finish_reason == "stop" or full:
                going.remove(number)
    assert said == reference


def test_without_drafts_texts_are_the_same_asynchronously(start, reference, prompts):
    assert rollout(start(Side(OFF, ahead=True)), prompts) == reference


def test_rejected_drafts_do_not_show(start, reference, prompts):
    sam = SamConfig(max_draft_tokens=3, gate=ALWAYS)
    engine = start(Side(sam, engine={"speculative_config": FORCED}))
    assert rollout(engine, prompts) == reference


def leave_out(part: str, patch: pytest.MonkeyPatch) -> None:
    read = TreeKeeper._read

    def without_positions(keeper: TreeKeeper, drafts: Any) -> StepTrees | None:
        positions = keeper._runner.positions.clone()
        found = read(keeper, drafts)
        keeper._runner.positions.copy_(positions)
        return found

    if part == "positions":
        patch.setattr(TreeKeeper, "_read", without_positions)
    else:
        patch.setattr(CpuTreeAttention, "accept", lambda *_: None)
    if part == "attention":
        patch.setattr(CpuTreeAttention, "plan", lambda *_: None)


@pytest.mark.parametrize("part", ["positions", "attention", "compaction"])
def test_trees_need_each_part_of_their_verification(part, start, reference, prompts, monkeypatch):
    leave_out(part, monkeypatch)
    first = 3 * len(prompts) // 4
    assert rollout(start(SIDES["tree"]), prompts, first) != reference[first * SIBLINGS :]


def test_siblings_differ(reference):
    differ = [a != b for a, b in zip(reference[::2], reference[1::2], strict=True)]
    assert sum(differ) > 0.8 * len(differ)


SAMPLING: dict[str, dict[str, Any]] = {
    "T=0.6 top-k top-p": {"temperature": 0.6, "top_k": 20, "top_p": 0.9},
    "top-p": {"top_p": 0.7},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    "penalty and top-k": {"frequency_penalty": 0.2, "top_k": 12},
    "min tokens": {"min_tokens": 100, "bad_words": ["7"]},
    "stop strings": {"stop": ["= 1", "9."], "min_tokens": 30},
    "greedy": {"temperature": 0.0},
    "seed": {"seed": 5},
}


@pytest.fixture(scope="module")
def answer(prompts) -> Callable[[Any], list[Any]]:
    asked, parameters = [], []
    for sampling in SAMPLING.values():
        some = requests(prompts[:2], SIBLINGS, max_tokens=LONGEST, logprobs=0, **sampling)
        asked += some[0]
        parameters += some[1]

    def ask(engine: Any) -> list[Any]:
        outputs = engine.generate(asked, [one.clone() for one in parameters], use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    return ask


@pytest.fixture(scope="module")
def plain_answers(plain, answer) -> list[Any]:
    return answer(plain)


@pytest.mark.parametrize("name", ["k = 8", "tree", "ahead, k = 8", "coupled_inversion"])
def test_every_sampling_parameter_is_kept_by_drafts(name, start, engine_of, answer, plain_answers):
    if name in SIDES:
        engine, expected = engine_of(name), plain_answers
    else:
        expected = answer(start(Side(OFF, sampler=name)))
        engine = start(Side(SamConfig(gate=ALWAYS), sampler=name))
    engine.collective_rpc("sam_drain")
    found = [expected, answer(engine)]
    _, accepted = drafts(engine.collective_rpc("sam_drain")[0])
    assert accepted > 300, "drafts were at work"
    assert any(one.stop_reason in SAMPLING["stop strings"]["stop"] for one in found[1])
    same = [a == b for a, b in zip(*map(texts, found), strict=True)]
    assert sum(same) >= len(same) - 2
    for left, right, equal in zip(*found, same, strict=True):
        assert len(right.logprobs) == len(right.token_ids)
        for token, a, b in zip(left.token_ids, left.logprobs, right.logprobs, strict=False):
            if equal:
                assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-3)
                assert a[token].rank == b[token].rank


@pytest.mark.parametrize(
    "sampling",
    [{}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 0.6, "top_k": 20, "top_p": 0.9}],
    ids=["T=1", "top-p", "top-k", "T=0.6 top-k top-p"],
)
def test_logprobs_of_sampled_tokens_agree_with_hugging_face(engine_of, model, prompts, sampling):
    engine, differences, total = engine_of("opens"), [], 0
    engine.collective_rpc("sam_drain")
    outputs = generate(engine, prompts[:4], max_tokens=LONGEST, logprobs=0, **sampling)
    assert drafts(engine.collective_rpc("sam_drain")[0])[1] > 0
    for prompt, output in zip(prompts, outputs, strict=False):
        tokens = list(output.token_ids)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logits = logits.float() / sampling.get("temperature", 1.0)
        k = torch.full((len(tokens),), sampling["top_k"]) if "top_k" in sampling else None
        p = torch.full((len(tokens),), sampling["top_p"]) if "top_p" in sampling else None
        expected = apply_top_k_top_p_pytorch(logits, k, p).log_softmax(-1)
        for row, token, found in zip(expected, tokens, output.logprobs, strict=True):
            if row[token].isfinite():
                differences.append(abs(found[token].logprob - row[token].item()))
        total += len(tokens)
    assert len(differences) > 0.99 * total
    differences.sort()
    assert differences[len(differences) // 2] < 1e-4
    assert differences[int(0.99 * len(differences))] < 1e-2


@pytest.mark.parametrize("sampling", [{"min_p": 0.1}, {"logit_bias": {40: 1.0}}])
def test_what_cannot_be_verified_is_refused(engine_of, prompts, sampling):
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="min_p and logit_bias"):
        generate(engine_of("k = 8"), prompts[:1], max_tokens=5, **sampling)


def test_a_drafter_that_fails_with_a_step_on_its_way_ends_no_rollout(
    start, reference, prompts, caplog
):
    engine = start(SIDES["ahead, k = 8"])
    calls = failing(session_of(engine).drafter, "observe", at=40)
    assert rollout(engine, prompts) == reference
    assert engine.collective_rpc("sam_drain")[0]["counters"]["draft/failures"] == 1
    assert len(calls) == 40 and caplog.text.count("switched off") == 1


def test_the_measuring_gate_sees_every_step_of_the_engine(engine_of, prompts, monkeypatch):
    engine = engine_of("auto")
    calls = spied(monkeypatch, session_of(engine).gate, "next_budget")
    engine.collective_rpc("sam_drain")
    assert not engine.llm_engine.vllm_config.scheduler_config.async_scheduling
    tokens = sum(map(len, rollout(engine, prompts, first=len(prompts) // 2)))
    drained = engine.collective_rpc("sam_drain")[0]
    counters = drained["counters"]
    # More than a fifth of the steps are measured, because the gate skips at most 3 steps after
    # a measurement, and few other steps go unmeasured.
    measured, steps = counters["gate/measured_steps"], counters["draft/drafter_steps"]
    assert steps / 5 < measured <= steps == calls["next_budget"]
    assert counters["draft/failures"] == 0
    assert 0 < counters["gate/measured_tokens"] < tokens
    first, last = drained["steps"]["noted_s"][0], drained["steps"]["noted_s"][-1]
    assert 0 < counters["gate/measured_s"] < last - first


def test_the_engines_statistics_less_filling_are_what_the_requests_have(engine_of, prompts):
    engine = engine_of("filled up")
    recorders = EngineRecorders(1)
    before = engine.collective_rpc("sam_drain")[0]["requests"]
    engine.llm_engine.logger_manager.stat_loggers.append(recorders)
    rollout(engine, prompts[:6])
    report = engine.collective_rpc("sam_drain")[0]
    (recorder,) = recorders.recorders
    table = recorder.drain(step=0, split="train", replica=0, session_steps=report["steps"])
    for name in before:
        report["requests"].pop(name, None)
    drafted, accepted = drafts(report)
    assert 0 < accepted < drafted
    assert sum(table["draft_tokens"].to_pylist()) == drafted
    assert sum(table["accepted_tokens"].to_pylist()) == accepted
