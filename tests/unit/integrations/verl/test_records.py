"""Records on their way from the server through the trainer to the run folder, without an engine."""

import asyncio
import dataclasses
import math
import platform
import time
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
from verl.workers.rollout.replica import TokenOutput

from sam_rollout.config import RolloutTelemetryConfig, SamConfig, SentinelConfig
from sam_rollout.identity import identify
from sam_rollout.integrations.verl import server, trainer
from sam_rollout.integrations.verl.response_counts import ResponseBook
from sam_rollout.integrations.verl.server import REQUEST_ID_FIELD, SamHttpServer
from sam_rollout.integrations.vllm.serving.engine_group import EngineRecorders
from sam_rollout.integrations.vllm.settings import EngineSettings
from sam_rollout.sources.history import HistorySourceConfig
from sam_rollout.telemetry.progress import EngineProgress
from sam_rollout.telemetry.records import DraftNote, RunFolder
from sam_rollout.telemetry.schema import declared
from sam_rollout.telemetry.sentinel import Sentinel, TrainingStep

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
    ours._settings, ours.replica_rank = EngineSettings(SamConfig()), 0
    ours.engine, ours._finished, ours._recorders = None, [], EngineRecorders(1)
    return ours


def extra_args(prompt: list[int], split: str) -> dict:
    return identify(prompt, seed=1, step=STEP, sibling=0, split=split).to_extra_args()


async def respond(ours: SamHttpServer, split: str = "train") -> list[TokenOutput]:
    return [
        await ours.generate(prompt, {"extra_args": extra_args(prompt, split)}, f"request-{number}")
        for number, prompt in enumerate(PROMPTS)
    ]


def test_requests_keep_their_identity_and_responses_are_known_by_their_id(ours, asked):
    outputs = asyncio.run(respond(ours))
    assert all("sam" in call["extra_args"] for call in asked)
    ids = [output.extra_fields[REQUEST_ID_FIELD] for output in outputs]
    assert ids == [f"request-{number}" for number in range(len(PROMPTS))]


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


DRAFTING = [0, 2, 3, 5]


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
    trainer_._telemetry = RolloutTelemetryConfig()
    trainer_._responses, trainer_._run_folder = ResponseBook(dumped=False), RunFolder(tmp_path)
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
    assert metrics["sam/draft/verify_context_0"] == 8
    assert metrics["sam/sampler/time_us_per_step"] == 20.0
    table = collecting._run_folder.root / "requests" / "0-000.parquet"
    rows = pq.ParquetFile(table).read().to_pylist()
    assert [(r["open_steps"], r["open_tokens"]) for r in rows] == [
        (2, 3) if number in DRAFTING else (3, 3) for number in range(len(PROMPTS))
    ]
    found = collecting._responses._find({REQUEST_ID_FIELD: f"request-{DRAFTING[0]}"})
    assert found[:3] == (6, 1, 2)
    assert asyncio.run(ours.progress()) == EngineProgress(), "a new step begins"


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
        await ours.hear_texts(1, None, [piece])
        await ours._sharing.share()
        return TokenOutput(token_ids=RESPONSE, stop_reason="completed")

    async def run():
        await ours.hear_texts(1, None, [piece])  # nobody shares yet
        await ours.share_texts({0: None, 1: None})
        await ours.generate(prompt, {"extra_args": {"sam": sam}}, "request")
        await ours.hear_texts(1, None, [piece])
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


def test_ended_responses_go_through_the_server_to_other_folders(ours, collecting, tmp_path):
    """From a finished request here to the keeper of another folder, and from one elsewhere."""
    history = HistorySourceConfig(path=str(tmp_path / "history"))
    sources = dataclasses.replace(ours._settings.sam.sources, history=history)
    ours._settings = EngineSettings(SamConfig(sources=sources))
    model = SimpleNamespace(max_model_len=100, get_vocab_size=lambda: 50)
    ours.engine = SimpleNamespace(model_config=model)
    told = []

    async def hear(*message):
        told.append(message)

    async def run():
        assert await ours.find_history_keeper("run") == 0
        await ours.share_history("run", {})
        assert ours._history is None, "one folder"
        await ours.share_history(
            "run", {1: SimpleNamespace(hear_history=SimpleNamespace(remote=hear))}
        )
        await respond(ours, "val")
        await respond(ours)
        await asyncio.sleep(0)
        await ours.hear_history(1, 1, told[0][2])

    asyncio.run(run())
    pieces = [piece for _, _, pieces in told for piece in pieces]
    assert [np.frombuffer(piece[-1], "<i4").tolist() for piece in pieces] == [
        [*prompt, *RESPONSE] for prompt in PROMPTS
    ]
    metrics = collecting._collect("train")
    assert metrics["sam/draft/history_unheard"] == 0


def test_a_worker_that_reports_nothing_is_missed(ours, collecting, monkeypatch, caplog):
    """No session on any rank, as where another drafter was loaded or nobody bound it."""

    async def silent(engine, method):
        return [[None, None]]

    monkeypatch.setattr(server, "ask_engines", silent)
    collecting._drain("train")
    collecting._sentinel = Sentinel(SentinelConfig())
    collecting.logger = SimpleNamespace(logger={})
    metrics = collecting._watch(collecting._sentinel, {"response_length/mean": 4.0})
    assert metrics["sam/sentinel/counters_missing"] == 1
    (line,) = [record.getMessage() for record in caplog.records if "Sentinel" in record.message]
    assert line.startswith(
        f"Sentinel, training step {STEP}: counters_missing: no drafter's counters from replica 0. "
    )


@pytest.mark.parametrize(
    ("exchange", "lost"),
    [("_sharing", "draft/shared_lost"), ("_history", "draft/history_unheard")],
)
def test_an_engine_without_session_is_missed_though_its_server_shares_texts(
    ours, collecting, monkeypatch, exchange, lost
):
    """What the server counts is told by an engine that counts, and by none that is silent."""

    async def first_is_silent(engine, method):
        return [[None, None], [drained_worker(DRAFTING), None]]

    async def both_are_silent(engine, method):
        return [[None, None], [None, None]]

    ours._recorders = EngineRecorders(2)
    setattr(ours, exchange, SimpleNamespace(take_counters=lambda: {lost: 3}))
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
