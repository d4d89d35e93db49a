"""Tests that drafting engines neither lose nor double a token under random events (`EVENTS`).

The tiny model runs with the coupled sampler at T = 1, in vLLM's asynchronous path
(`tests/emulated_device.py`) or synchronously. Each response must equal that of an engine without
drafts. If SAM_FUZZ_SECONDS is set, more engines run for this time; their seeds count up from
SAM_FUZZ_SEED. A failure names its seed.
"""

import itertools
import os
import random
import time
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from sam_rollout.config import GateConfig, RolloutSamplerConfig, SamConfig, sources_of
from sam_rollout.gating import ScheduleGate
from sam_rollout.gating.gate import LOOK
from sam_rollout.integrations.vllm.offline import offline_engine, prepare_environment
from sam_rollout.sources.model import ModelSourceConfig
from tests.integration.conftest import MODEL
from tests.integration.responses import core_of, requests, runner_of, session_of, texts

PROMPTS, SIBLINGS, MAX_TOKENS = 16, 4, 160
COUPLED = RolloutSamplerConfig("coupled")
SMALL = {
    "max_num_seqs": 8, "max_num_batched_tokens": 48, "num_gpu_blocks_override": 14,
    "block_size": 128,
}  # fmt: skip
LARGE = {"max_num_seqs": 32}
TEXTS = ("own", "prompt", "run", "draws")
HEAD = f"{MODEL}_eagle3"
RANDOM, RANDOM_SHAPES = GateConfig("closed"), GateConfig("auto", exploration=0.0)
TREE_SEEDS = [54, 100]
pytestmark = pytest.mark.usefixtures("few_collections")
SECONDS, SEED = (int(os.environ.get(f"SAM_FUZZ_{name}", 0)) for name in ("SECONDS", "SEED"))
EVENTS = {
    "abort": 0.03, "drain": 0.02, "exchange": 0.05, "weights": 0.01, "reset": 0.02, "pause": 0.02,
    "sleep": 0.003,
}  # fmt: skip


class RandomGate(ScheduleGate):
    def __init__(self, chance: random.Random, k: int, shapes: int) -> None:
        self._chance, self._k, self._shapes, self._open = chance, k, shapes, True

    def budget(self, rows: int, *, whole: bool = False, room: bool = True) -> int:
        self._open ^= self._chance.random() < 0.1
        if self._shapes > 1:
            self.shape = self._chance.randrange(self._shapes)
            self.least_chance = self._chance.choice([0.0, 0.05, 0.3, LOOK])
        return self._k * self._open


def rewrite_weights(worker: Any) -> None:
    for parameter in worker.model_runner.model.parameters():
        parameter.data.copy_(parameter.data.clone())


class Life:
    def __init__(
        self, engine: Any, sam: SamConfig, known: list[Any], chance: random.Random
    ) -> None:
        self._engine, self._known, self._chance = engine, known, chance
        self._core, self._session = core_of(engine), session_of(engine)
        self._head = runner_of(engine).drafter if sam.drafts_with_model else None
        shapes = self._session.drafter.shapes
        if sam.gate in (RANDOM, RANDOM_SHAPES):
            self._session.gate = RandomGate(chance, sam.max_draft_tokens, len(shapes))
        self._fails_at = chance.randrange(200) if chance.random() < 0.2 else -1
        self._live: list[str] = []
        self._failures: Counter[str] = Counter()
        scheduler = type(self._core.scheduler).__name__
        ahead = sam.scheduling == "auto"
        expected = "LateBindingScheduler" if ahead else "SyncScheduler"
        assert scheduler == expected, f"scheduled by {scheduler}"
        has_head = self._head is not None
        self.totals: Counter[str] = Counter(
            engines=1, with_head=has_head, head_ahead=has_head and ahead, trees="tree" in shapes,
            random_gate=sam.gate in (RANDOM, RANDOM_SHAPES),
        )  # fmt: skip
        self._meant: dict[str, int] = {}  # failures that `_break` caused

    def run(self) -> None:
        """Run until every request has ended; raises AssertionError if a text differs."""
        engine, chance = self._engine.llm_engine, self._chance
        waiting = chance.sample(range(len(self._known)), len(self._known))
        while waiting or engine.has_unfinished_requests():
            if waiting and (not self._live or chance.random() < 0.3):
                for number in [
                    waiting.pop() for _ in range(min(len(waiting), chance.randint(1, 5)))
                ]:
                    prompt, sampling, _ = self._known[number]
                    engine.add_request(str(number), prompt, sampling)
                    self._live.append(str(number))
            for event, share in EVENTS.items():
                if chance.random() < share:
                    self.totals[event] += 1
                    getattr(self, f"_{event}")()
            if self.totals["steps"] == self._fails_at:
                self._break()
            for output in engine.step():
                self._judge(output)
            self.totals["steps"] += 1
        for _ in range(2):
            engine.step()  # tells the worker which requests have ended
        self._drain()
        failed = {name: count for name, count in self._failures.items() if count}
        assert failed in ({}, self._meant), f"failed: {failed}, caused on purpose: {self._meant}"
        levels = self._session.drafter.levels() if self._session.drafter else {}
        pool = self._core.scheduler.kv_cache_manager.block_pool
        held = len(self._core.scheduler.requests), levels.get("draft/live_requests", 0)
        assert held == (0, 0), f"requests left in scheduler and drafter: {held}"
        free = pool.get_num_free_blocks()
        assert free == pool.num_gpu_blocks - 1, f"{free} of {pool.num_gpu_blocks} blocks are free"

    def _judge(self, output: Any) -> None:
        (one,), (_, _, text) = output.outputs, self._known[int(output.request_id)]
        found = list(one.token_ids)
        if output.finished and one.finish_reason != "abort":
            self._live.remove(output.request_id)
            self.totals["responses"] += 1
            self.totals["tokens"] += len(found)
        else:
            text = text[: len(found)]
        assert found == text, f"request {output.request_id}: {found}, not {text}"

    def _abort(self, count: int = 1) -> None:
        for name in self._chance.sample(self._live, min(count, len(self._live))):
            self._engine.llm_engine.abort_request([name])
            self._live.remove(name)

    def _drain(self) -> None:
        drained = self._engine.collective_rpc("sam_drain")[0]
        self.totals["tree_steps"] += sum(drained["steps"]["draft_trees"])
        for _, drafted, accepted, *_ in drained["requests"].values():
            self.totals += Counter(drafted=drafted, accepted=accepted)
        for name, value in drained["counters"].items():
            if name.endswith("failures"):
                self._failures[name] += value

    def _exchange(self) -> None:
        self._engine.collective_rpc("sam_exchange_texts", args=("elsewhere", []))

    def _weights(self) -> None:
        self._engine.collective_rpc(rewrite_weights)

    def _reset(self) -> None:
        self._core.reset_prefix_cache(reset_running_requests=True)

    def _pause(self) -> None:
        self._core.pause_scheduler(mode="keep", clear_cache=False)
        for _ in range(self._chance.randint(0, 3)):
            for output in self._engine.llm_engine.step():
                self._judge(output)
        self._core.resume_scheduler()

    def _sleep(self) -> None:
        self._abort(len(self._live))
        self._core.sleep(level=1)
        self._core.wake_up()

    def _break(self) -> None:
        def fail(*_arguments: Any, **_options: Any) -> Any:
            raise RuntimeError("broken on purpose")

        if self._head is not None and self._chance.random() < 0.5:
            self._head.propose, self._meant = fail, {"draft/model_failures": 1}
        else:
            part = self._chance.choice(["observe", "draft", "settle"])
            setattr(self._session.drafter, part, fail)
            self._meant = {"draft/failures": 1}
        self.totals["drafters_failed"] += 1


def is_plain(sampling: Any) -> bool:
    ruled = sampling.structured_outputs is not None or sampling.min_tokens > 0
    return sampling.repetition_penalty == 1.0 and not ruled


def known_responses(prompts: list[list[int]]) -> list[Any]:
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    chance = random.Random(0)
    limits = [chance.randint(1, MAX_TOKENS) for _ in range(PROMPTS * SIBLINGS)]
    asked, sampling = requests(prompts[:PROMPTS], SIBLINGS, max_tokens=limits)
    for one in sampling:
        one.repetition_penalty = chance.choice([1.0, 1.0, 1.0, 1.3])
        one.stop_token_ids = chance.choice([[], [], [7, 11]])
        kind = chance.randrange(12)
        if kind == 0:
            one.structured_outputs = StructuredOutputsParams(regex="((yes|no) ){8}")
        elif kind == 1:
            one.min_tokens = one.max_tokens // 2
    with engine_of(SamConfig(enabled=False), **LARGE) as engine:
        outputs = engine.generate(asked, sampling, use_tqdm=False)
    for one in sampling:
        one.output_kind = RequestOutputKind.CUMULATIVE  # `generate` changes this field
    found = texts(output.outputs[0] for output in outputs)
    return list(zip(asked, sampling, found, strict=True))


def engine_of(sam: SamConfig, **sizes: Any) -> Any:
    return offline_engine(
        MODEL, sam, COUPLED, record=True, dtype="float32", max_model_len=1280, **sizes
    )


def any_sam(chance: random.Random, most_tokens: int) -> SamConfig:
    kind = chance.choice(["random", "auto", "threshold"])
    threshold = chance.choice([4, 16, 64])
    return replace(
        SamConfig(gate=RANDOM if kind == "random" else GateConfig(kind, threshold=threshold)),
        max_draft_tokens=chance.randint(1, most_tokens),
        sources=sources_of(*chance.choice([TEXTS, (*TEXTS, "recycling")])),
    )


def with_head(chance: random.Random, sam: SamConfig) -> SamConfig:
    head = ModelSourceConfig(True, "eagle3", HEAD, chance.randint(1, min(4, sam.max_draft_tokens)))
    return replace(sam, sources=replace(sam.sources, model=head))


def any_sizes(chance: random.Random) -> dict[str, Any]:
    return {**chance.choice([SMALL, LARGE]), "enable_prefix_caching": chance.random() < 0.5}


def live_with_trees(seed: int, known: list[Any]) -> Counter[str]:
    chance = random.Random(seed)
    sam = any_sam(chance, 16)
    if sam.gate == RANDOM:
        sam = replace(sam, gate=RANDOM_SHAPES)
    shapes = ["tree", "auto"] if sam.gate.kind == "auto" else ["tree"]
    sam = replace(
        sam,
        max_draft_tokens=max(2, sam.max_draft_tokens),
        draft_shape=chance.choice(shapes),
        step_budget=chance.choice([4, 32, 128]),
        scheduling="sync",
    )
    if chance.random() < 0.25:
        sam = with_head(chance, sam)
    sizes = any_sizes(chance)
    if "block_size" not in sizes:
        sizes["block_size"] = chance.choice([32, 128])
    with engine_of(sam, **sizes) as engine:
        one = Life(engine, sam, known, chance)
        one.run()
    return one.totals


def live(seed: int, known: list[Any]) -> Counter[str]:
    from sam_rollout.integrations.vllm.scheduling import late_binding
    from tests.emulated_device import asynchronous_scheduling

    chance = random.Random(seed)
    if chance.random() < 0.5:
        known = [one for one in known if is_plain(one[1])]
    ahead = mock.patch.object(late_binding, "SCORED_AHEAD", chance.choice([0, 32, 256]))
    sam, sizes = any_sam(chance, 8), any_sizes(chance)
    if chance.random() < 0.25:
        sam = replace(with_head(chance, sam), scheduling=chance.choice(["auto", "auto", "sync"]))
    with ahead, asynchronous_scheduling(), engine_of(sam, **sizes) as engine:
        one = Life(engine, sam, known, chance)
        one.run()
    return one.totals


@pytest.fixture(scope="module")
def known(prompts):
    prepare_environment()
    return known_responses(prompts)


@pytest.mark.parametrize(("seed", "with_head", "head_ahead"), [(3, 0, 0), (24, 1, 0), (83, 1, 1)])
def test_random_events_lose_and_double_no_token(known, seed, with_head, head_ahead):
    totals = live(seed, known)
    assert totals["responses"] >= 15
    assert (totals["with_head"], totals["head_ahead"]) == (with_head, head_ahead)
    assert 0 < totals["accepted"] < totals["drafted"]
    assert sum(totals[event] > 0 for event in EVENTS) >= 4


@pytest.mark.parametrize("seed", TREE_SEEDS)
def test_random_events_with_trees_lose_and_double_no_token(known, seed):
    totals = live_with_trees(seed, known)
    assert totals["random_gate"] and totals["responses"] >= 15
    assert totals["tree_steps"] > 10
    assert 0 < totals["accepted"] < totals["drafted"]
    assert sum(totals[event] > 0 for event in EVENTS) >= 3


@pytest.mark.skipif(not SECONDS, reason="SAM_FUZZ_SECONDS is not set")
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("lives", [live, live_with_trees])
def test_other_engines(known, lives):
    until = time.monotonic() + SECONDS
    totals: Counter[str] = Counter()
    for seed in itertools.count(SEED):
        try:
            totals += lives(seed, known)
        except Exception as error:
            raise AssertionError(f"SAM_FUZZ_SEED={seed}: {error}") from error
        if time.monotonic() > until:
            break
    print(dict(totals))
