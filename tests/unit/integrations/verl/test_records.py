"""Records on their way from the server through the trainer to the run folder, without an engine."""

import asyncio
import math
import platform
import time
from dataclasses import asdict
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest
from verl.workers.rollout.replica import TokenOutput

from sam_rollout.config import RolloutTelemetryConfig, SamConfig, SentinelConfig
from sam_rollout.identity import identify
from sam_rollout.integrations.verl import server, trainer
from sam_rollout.integrations.verl.response_counts import ResponseBook
from sam_rollout.integrations.verl.server import REQUEST_ID_FIELD, SamHttpServer
from sam_rollout.integrations.vllm.engine_group import EngineRecorders
from sam_rollout.integrations.vllm.settings import EngineSettings
from sam_rollout.telemetry.control import ControlAssignment
from sam_rollout.telemetry.progress import EngineProgress
from sam_rollout.telemetry.records import DraftNote, RunFolder
from sam_rollout.telemetry.schema import declared
from sam_rollout.telemetry.sentinel import Sentinel, TrainingStep

CONTROL = ControlAssignment(share=0.5, unit="groups", seed=1, replicas=1)
PROMPTS = [[number, number + 1, 7] for number in range(8)]
STEP = 3
RESPONSE = [4, 5, 6, 7]
NOTE = DraftNote(gate_open=True, drafter_us=40.0, draft_budget=3, sampler_us=20.0, telemetry_us=2.0)


@pytest.fixture
def asked(monkeypatch) -> list[dict]:
    """What reaches verl's own ``generate``."""
    calls = []

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        calls.append(sampling_params)
        await asyncio.sleep(0)
        return TokenOutput(token_ids=RESPONSE, stop_reason="completed")

    monkeypatch.setattr(server.vLLMHttpServer, "generate", generate)
    return calls


@pytest.fixture
def ours() -> SamHttpServer:
    ours = object.__new__(SamHttpServer)
    ours._settings, ours.replica_rank = EngineSettings(SamConfig(), control=CONTROL), 0
    ours.engine, ours._finished, ours._recorders = None, [], EngineRecorders(1)
    return ours


def extra_args(prompt: list[int], split: str) -> dict:
    return identify(prompt, seed=1, step=STEP, sibling=0, split=split).to_extra_args()


def is_control(prompt: list[int]) -> bool:
    group = extra_args(prompt, "train")["sam"]["group"]
    return CONTROL.is_control(step=STEP, group=group, replica=0)


async def respond(ours: SamHttpServer, split: str = "train") -> list[TokenOutput]:
    return [
        await ours.generate(prompt, {"extra_args": extra_args(prompt, split)}, f"request-{number}")
        for number, prompt in enumerate(PROMPTS)
    ]


def test_a_share_of_the_training_prompts_asks_for_no_drafts(ours, asked):
    outputs = asyncio.run(respond(ours))
    flags = [call["extra_args"]["sam_control"] for call in asked]
    assert flags == [is_control(prompt) for prompt in PROMPTS]
    assert 0 < sum(flags) < len(flags)
    assert all("sam" in call["extra_args"] for call in asked), "their identity is kept"
    ids = [output.extra_fields[REQUEST_ID_FIELD] for output in outputs]
    assert ids == [f"request-{number}" for number in range(len(PROMPTS))]


def test_validation_and_requests_without_identity_have_no_control(ours, asked):
    asyncio.run(respond(ours, split="val"))
    asyncio.run(ours.generate([1, 2], {}, "no-identity"))
    assert not any(call["extra_args"]["sam_control"] for call in asked)


def test_a_server_without_control_asks_for_drafts_always(ours, asked):
    ours._settings = EngineSettings(SamConfig())
    asyncio.run(respond(ours))
    assert not any(call["extra_args"]["sam_control"] for call in asked)


def test_progress_before_during_and_after(ours, asked):
    assert asyncio.run(object.__new__(SamHttpServer).progress()) == EngineProgress()
    asyncio.run(respond(ours))
    record_a_step(ours)
    now = asyncio.run(ours.progress())
    assert (now.finished, now.running, now.tokens, now.engines) == (len(PROMPTS), 3, 9, 1)


def record_a_step(ours: SamHttpServer) -> None:
    scheduler = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=0, spec_decoding_stats=None)
    iteration = SimpleNamespace(
        time_to_first_tokens_iter=[],
        inter_token_latencies_iter=[0.1] * 3,
        num_preempted_reqs=0,
        num_prompt_tokens=0,
        num_generation_tokens=9,
        finished_requests=[],
    )
    ours._recorders.record(scheduler, iteration)


def drained_worker(drafting: list[int]) -> dict:
    """What a worker's ``sam_drain`` returns; vLLM's ids have a suffix."""
    ids = {number: f"request-{number}-0a1b2c3d" for number in range(len(PROMPTS))}
    return {
        "steps": {
            "noted_s": [time.monotonic() - 1000],
            **{name: [value] for name, value in asdict(NOTE).items()},
        },
        "host": platform.node(),
        "clock_s": time.monotonic(),
        "requests": {ids[n]: (2, 6, 1, 2, 3) if n in drafting else (0, 0, 0, 3, 3) for n in ids},
        "counters": {"draft/failures": 0, "draft/verify_context_0": 8},
    }


DRAFTING = [number for number, prompt in enumerate(PROMPTS) if not is_control(prompt)]


@pytest.fixture
def collecting(ours, asked, tmp_path, monkeypatch) -> trainer.SamTrainerSync:
    """A trainer with one replica that has sampled a step's responses."""

    async def answer(engine, method):
        assert method == "sam_drain"
        return [[drained_worker(DRAFTING), None]]  # the second rank's drafts are not used

    monkeypatch.setattr(server, "ask_engines", answer)
    asyncio.run(respond(ours))
    record_a_step(ours)

    trainer_ = object.__new__(trainer.SamTrainerSync)
    trainer_.global_steps = STEP
    trainer_._telemetry = RolloutTelemetryConfig(control_share=0.5)
    trainer_._control, trainer_._responses = CONTROL, ResponseBook(dumped=False)
    trainer_._run_folder, trainer_._control_steps = RunFolder(tmp_path), {}
    remote = SimpleNamespace(remote=lambda *args: asyncio.run(ours.drain_records(*args)))
    replica = SimpleNamespace(replica_rank=0, servers=[SimpleNamespace(drain_records=remote)])
    trainer_.llm_server_manager = SimpleNamespace(get_replicas=lambda: [replica])
    monkeypatch.setattr(trainer.ray, "get", lambda answers: answers)
    return trainer_


def test_a_step_goes_from_the_server_to_the_run_folder(ours, collecting):
    metrics = collecting._collect("train")
    for name, value in metrics.items():
        declared(name)
        assert math.isfinite(value), name
    assert metrics["sam/control/share"] == 1 - len(DRAFTING) / len(PROMPTS)
    assert metrics["sam/control/gain"] == pytest.approx(0.5)
    assert metrics["sam/draft/verify_context_0"] == 8
    assert metrics["sam/sampler/time_us_per_step"] == 20.0
    assert metrics["sam/engine/telemetry_us_per_step"] > 2.0
    table = collecting._run_folder.root / "requests" / "0-000.parquet"
    rows = pq.ParquetFile(table).read().to_pylist()
    assert [row["control"] for row in rows] == [is_control(prompt) for prompt in PROMPTS]
    assert [(r["open_steps"], r["open_tokens"]) for r in rows] == [
        (2, 3) if number in DRAFTING else (3, 3) for number in range(len(PROMPTS))
    ]
    found = collecting._responses._find({REQUEST_ID_FIELD: f"request-{DRAFTING[0]}"})
    assert found[:3] == (6, 1, 2)
    assert asyncio.run(ours.progress()) == EngineProgress(), "a new step begins"


def test_a_control_that_cannot_be_compared_costs_no_other_metric(collecting, monkeypatch, caplog):
    monkeypatch.setattr(trainer, "control_metrics", lambda *_, **__: 1 / 0)
    metrics = collecting._drain("train")
    assert metrics["sam/draft/verify_context_0"] == 8
    assert not any(name.startswith("sam/control/") for name in metrics)
    assert "control metrics are left out" in caplog.text and "are lost" not in caplog.text
    request_id = f"request-{DRAFTING[0]}"
    assert collecting._responses._find({REQUEST_ID_FIELD: request_id})[:3] == (6, 1, 2)


def test_texts_go_through_the_server_while_a_request_of_their_prompt_runs(
    ours, collecting, asked, monkeypatch
):
    """From another server to the engine, which is asked by the call that drains it, too."""
    prompt, heard = PROMPTS[0], []
    sam = extra_args(prompt, "train")["sam"]
    piece = ("train", STEP, sam["group"], "1.0/1", 0, False, b"1234")

    async def answer(engine, method, arguments):
        heard.append((method, arguments))
        return [[[], [("train", STEP, "of no peer", "0.0/1", 0, False, b"1234")]]]  # two ranks

    async def generate(self, *arguments, **keywords):
        await ours.hear_texts(1, "", None, [piece])
        await ours._sharing.share()
        return TokenOutput(token_ids=RESPONSE, stop_reason="completed")

    async def run():
        await ours.hear_texts(1, "", None, [piece])  # nobody shares yet
        await ours.share_texts({0: None, 1: None})
        await ours.generate(prompt, {"extra_args": {"sam": sam}}, "request")
        await ours.hear_texts(1, "", None, [piece])
        ours._sharing._task.cancel()

    ours.engine = SimpleNamespace(engine_core=SimpleNamespace(core_engines=[b"0"]))
    drain = server.ask_engines
    monkeypatch.setattr(server, "ask_engines", answer)
    monkeypatch.setattr(server.vLLMHttpServer, "generate", generate)
    asyncio.run(run())
    name = "sam_exchange_texts"
    assert heard == [(name, [("0.0", [])]), (name, [("0.0", [piece])])]
    ours._sharing._lost = 3
    monkeypatch.setattr(server, "ask_engines", drain)
    assert collecting._collect("train")["sam/draft/shared_lost"] == 3


def test_a_worker_that_reports_nothing_is_missed(ours, collecting, monkeypatch, caplog):
    """No session on any rank, as where another drafter was loaded or nobody bound it."""

    async def silent(engine, method):
        return [[None, None]]

    monkeypatch.setattr(server, "ask_engines", silent)
    collecting._drain("train")
    collecting._sentinel = Sentinel(SentinelConfig())
    collecting.logger = SimpleNamespace(logger={})
    collecting._control = ControlAssignment(0.0, "groups", 1, 1)
    metrics = collecting._watch(collecting._sentinel, None, {"response_length/mean": 4.0})
    assert metrics["sam/sentinel/counters_missing"] == 1
    (line,) = [record.getMessage() for record in caplog.records if "Sentinel" in record.message]
    assert line.startswith(
        f"Sentinel, training step {STEP}: counters_missing: no drafter's counters from replica 0. "
    )


def test_an_engine_without_session_is_missed_though_its_server_shares_texts(
    ours, collecting, monkeypatch
):
    """What the server counts is told by an engine that counts, and by none that is silent."""

    async def first_is_silent(engine, method):
        return [[None, None], [drained_worker(DRAFTING), None]]

    async def both_are_silent(engine, method):
        return [[None, None], [None, None]]

    lost = "draft/shared_lost"
    ours._recorders = EngineRecorders(2)
    ours._sharing = SimpleNamespace(take_counters=lambda: {lost: 3})
    for answer, silent in ((first_is_silent, [0]), (both_are_silent, [0, 1])):
        monkeypatch.setattr(server, "ask_engines", answer)
        records = asyncio.run(ours.drain_records(STEP, "train"))
        assert [one.replica for one in records if not one.drafter_counters] == silent
        assert [one.drafter_counters.get(lost) for one in records] == [
            None,
            None if 1 in silent else 3,
        ]
        found, _ = Sentinel(SentinelConfig()).look(TrainingStep({}, records))
        missing = "drafter's counters from replica " + ", ".join(map(str, silent))
        assert [one.name for one in found] == ["counters_missing"] and missing in found[0].seen


def test_records_that_are_lost_are_missed(collecting, monkeypatch):
    monkeypatch.setattr(trainer.ray, "get", lambda answers: 1 / 0)
    collecting._reports = ["of the step before"]
    assert collecting._drain("train") == {} == collecting._drain("val")
    assert collecting._reports == []
