"""Tests drafts of a model that vLLM runs, joined with drafts from texts.

The drafter is the tiny model itself. So all its drafts are right at T = 0, and also at T = 1 if
drafter and sampler share their noise. `tests/emulated_device.py` emulates asynchronous scheduling.
"""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, SourcesConfig
from sam_rollout.integrations.vllm.drafting.startup_check import StartUpError, check_alive
from sam_rollout.integrations.vllm.engine_settings import engine_arguments
from sam_rollout.integrations.vllm.scheduling import late_binding
from sam_rollout.integrations.vllm.scheduling.scheduler_choice import (
    SCHEDULER_CLASS,
    SYNC_SCHEDULER_CLASS,
)
from tests.emulated_device import asynchronous_scheduling
from tests.integration.conftest import MODEL
from tests.integration.random_drafters import write_medusa, write_policy_with_mtp
from tests.integration.responses import drafts, drafts_from, failing, generate, runner_of, texts

HEAD = Path(f"{MODEL}_eagle3")
K, TOKENS, SIBLINGS = 3, 120, 2
ALWAYS, CLOSED = GateConfig("threshold", 10_000), GateConfig("closed")
OFF = SamConfig(enabled=False)
both_ways = pytest.mark.parametrize("ahead", [False, True], ids=["synchronous", "ahead"])


def sam(
    *names: str,
    method: str = "draft_model",
    gate: GateConfig = ALWAYS,
    k: int = K,
    sampled: bool = True,
    path: str | Path | None = None,
) -> SamConfig:
    if path is None:
        path = {"ngram": "", "suffix": "", "mtp": "", "eagle3": HEAD}.get(method, MODEL)
    sources: dict[str, dict] = {
        name: {"enabled": name in names} for name in ("own", "prompt", "run", "recycling")
    }
    sources["model"] = {
        "enabled": True, "method": method, "path": str(path), "max_tokens": K, "sampled": sampled,
    }  # fmt: skip
    return SamConfig(max_draft_tokens=k, gate=gate, sources=SourcesConfig.from_mapping(sources))


@pytest.fixture(scope="module")
def start(make_engine) -> Any:
    def make(
        config: SamConfig, sampler: str = "coupled", ahead: bool = False, **arguments: Any
    ) -> Any:
        made = engine_arguments(config, RolloutSamplerConfig(sampler))
        with asynchronous_scheduling() if ahead else contextlib.nullcontext():
            engine = make_engine(config, **{**made, **arguments})
        if config.drafts_with_model:
            scheduler = engine.llm_engine.vllm_config.scheduler_config.scheduler_cls
            assert scheduler == (SCHEDULER_CLASS if ahead else SYNC_SCHEDULER_CLASS)
        return engine

    return make


@pytest.fixture(scope="module")
def some(prompts) -> list[list[int]]:
    return prompts[:8]


@pytest.fixture(scope="module")
def without(start) -> Any:
    """Return ``without(prompts, siblings, sampler, **sampling)``, which samples without drafts."""
    known: dict[str, list[list[int]]] = {}

    def ask(
        prompts: list[list[int]], siblings: int, sampler: str = "coupled", **sampling: Any
    ) -> list[list[int]]:
        name = repr((prompts, siblings, sampler, sampling))
        if name not in known:
            engine = start(OFF, sampler)
            known[name] = texts(generate(engine, prompts, siblings, max_tokens=TOKENS, **sampling))
        return known[name]

    return ask


@pytest.fixture(scope="module")
def reference(without, some) -> list[list[int]]:
    return without(some, SIBLINGS)


def drained(engine: Any) -> tuple[dict[str, int], int, int]:
    (report,) = engine.collective_rpc("sam_drain")
    return report["counters"], *drafts(report)


def drained_of_model(engine: Any) -> int:
    (report,) = engine.collective_rpc("sam_drain")
    counters = report["counters"]
    assert counters["draft/failures"] == counters["draft/model_failures"] == 0
    return drafts_from("model", report)[0]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(sam(), id="a model alone"),
        pytest.param(sam("own", "prompt", k=8), id="joined, k = 8"),
        pytest.param(sam("own", "prompt", k=8, sampled=False), id="the likeliest tokens"),
        pytest.param(sam("own", gate=GateConfig("auto", exploration=0.1)), id="gate auto"),
        pytest.param(sam(method="ngram"), id="the engine's own n-gram drafts"),
    ],
)
def test_texts_are_those_without_drafts(config, start, some, reference):
    engine = start(config)
    assert texts(generate(engine, some, SIBLINGS, max_tokens=TOKENS)) == reference
    counters, drafted, accepted = drained(engine)
    assert counters["draft/failures"] == 0 and counters["draft/model_tokens"] > 0
    if config.gate == ALWAYS:
        assert accepted > (0.4 if config.sources.model.method == "draft_model" else 0.1) * drafted


def test_texts_are_those_without_a_head_of_another_kind(start, some, reference, tmp_path):
    write_medusa(tmp_path, heads=K)
    config = sam("own", method="medusa", path=tmp_path, k=K + 2)
    engine = start(config)
    assert texts(generate(engine, some, SIBLINGS, max_tokens=TOKENS)) == reference
    assert drained_of_model(engine) > 100
    engine.collective_rpc("sam_probe", args=(True,))
    generate(engine, some, max_tokens=32)
    with pytest.raises(StartUpError, match=r"sam\.sources\.model\.path"):
        check_alive(engine.collective_rpc("sam_probe", args=(False,)), config)


def test_texts_are_those_without_the_policys_own_layers(start, some, tmp_path):
    write_policy_with_mtp(tmp_path)
    off = generate(start(OFF, model=str(tmp_path)), some, SIBLINGS, max_tokens=TOKENS)
    engine = start(sam("own", method="mtp"), model=str(tmp_path))
    assert texts(generate(engine, some, SIBLINGS, max_tokens=TOKENS)) == texts(off)
    assert drained_of_model(engine) > 100


@pytest.mark.parametrize(
    ("ahead", "scored_ahead"),
    [(False, 0), (True, 256), (True, 0)],
    ids=["synchronous", "prepared ahead", "bound"],
)
def test_drafts_that_share_the_noise_of_what_verifies_them_are_all_right(
    ahead, scored_ahead, start, some, without, monkeypatch
):
    monkeypatch.setattr(late_binding, "SCORED_AHEAD", scored_ahead)
    engine = start(sam(), "coupled", ahead)
    outputs = generate(engine, some, SIBLINGS, max_tokens=TOKENS, top_p=0.95)
    assert texts(outputs) == without(some, SIBLINGS, "coupled", top_p=0.95)
    _, drafted, accepted = drained(engine)
    assert drafted > 1000 and accepted > 0.995 * drafted


def test_a_step_ahead_as_many_drafts_are_verified_and_as_good(start, prompts, without):
    config = sam("own", "prompt", method="eagle3", k=8, gate=GateConfig("threshold", 24))
    told = []
    for engine in start(config), start(config, ahead=True):
        assert texts(generate(engine, prompts, 5, max_tokens=TOKENS)) == without(prompts, 5)
        counters, drafted, accepted = drained(engine)
        told.append((counters["draft/model_tokens"], drafted, accepted / drafted))
    (made, drafted, share), (made_ahead, drafted_ahead, share_ahead) = told
    assert made_ahead > 0.9 * made and drafted_ahead > 0.9 * drafted
    assert share_ahead > 0.97 * share


@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_model_goes_on_from_the_path_that_is_accepted_of_a_tree(method, start, some, reference):
    shares, trees = [], []
    for shape in "chain", "tree":
        config = replace(sam("own", "prompt", method=method, k=8), draft_shape=shape)
        engine = start(config)
        engine.collective_rpc("sam_probe", args=(True,))
        assert texts(generate(engine, some, SIBLINGS, max_tokens=TOKENS)) == reference
        ((judged, right),) = engine.collective_rpc("sam_probe", args=(False,))
        shares.append(right / judged)
        (report,) = engine.collective_rpc("sam_drain")
        assert report["counters"]["draft/model_failures"] == 0
        trees.append(any(report["steps"]["draft_trees"]))
        assert drafts_from("model", report)[0] > 100
    assert trees == [False, True]
    assert shares[1] == pytest.approx(shares[0], abs=0.06)


def passes_of(engine: Any) -> list[int]:
    drafter, asked = runner_of(engine).drafter, []
    propose = drafter.propose

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(args[0] if args else kwargs["num_speculative_tokens"])
        return propose(*args, **kwargs)

    drafter.propose = noted
    return asked


@both_ways
def test_a_model_that_fails_leaves_drafts_from_texts(ahead, start, some, reference, caplog):
    engine = start(sam("own"), ahead=ahead)
    calls = failing(runner_of(engine).drafter, "propose", at=10)
    assert texts(generate(engine, some, SIBLINGS, max_tokens=TOKENS)) == reference
    counters, *_ = drained(engine)
    assert counters["draft/failures"] == 0 and counters["draft/model_failures"] == 1
    assert len(calls) == 10 and caplog.text.count("is not run any more") == 1
    generate(engine, some, SIBLINGS, max_tokens=TOKENS, step=1)
    _, drafted, accepted = drained(engine)
    assert drafted > 0 and accepted > 0 and len(calls) == 10


@both_ways
def test_behind_a_closed_gate_a_model_runs_its_first_pass_and_tells_if_it_is_alive(
    ahead, start, some, reference
):
    config = sam("own", gate=CLOSED)
    engine = start(config, ahead=ahead)
    passes = passes_of(engine)
    assert texts(generate(engine, some, SIBLINGS, max_tokens=TOKENS)) == reference
    assert set(passes[1:]) == {0}  # before the first step, no gate has decided yet
    assert drained(engine)[1] == 0
    for weight, expected in (1.0, True), (0.0, False):
        for parameter in runner_of(engine).drafter.model.parameters():
            parameter.data.mul_(weight)
        engine.collective_rpc("sam_probe", args=(True,))
        generate(engine, some, max_tokens=32, temperature=0.0)
        answers = engine.collective_rpc("sam_probe", args=(False,))
        if expected:
            assert "were right" in check_alive(answers, config)
            judged, right = answers[0]
            assert judged > 100 and right > 0.9 * judged
        else:
            with pytest.raises(StartUpError, match=r"sam\.sources\.model\.path"):
                check_alive(answers, config)
