import logging
import platform
import time
from dataclasses import asdict

import pytest

from sam_rollout.config import CompareConfig, RunConfig
from sam_rollout.core.identity import RequestIdentity, group_of, identify
from sam_rollout.integrations.verl.replica_records import FinishedRequest, Place, join_records
from sam_rollout.integrations.verl.step_records import StepRecords
from sam_rollout.integrations.vllm.serving.step_recorder import EngineStepRecorder
from sam_rollout.telemetry.records import DraftNote, RunFolder, RunInfo
from tests.unit.integrations.vllm.engine_stats import progress, scheduler

STEP, RESPONSES = 3, 4
NOTE = DraftNote(gate_open=True, drafter_us=40.0, draft_budget=3)
COUNTS = 2, 6, 1, 2, 3


def worker() -> dict:
    steps = {name: [value] for name, value in asdict(NOTE).items()}
    return {
        "steps": {"noted_s": [time.monotonic() - 1000], **steps},
        "host": platform.node(),
        "clock_s": time.monotonic(),
        "requests": {f"request-{number}-0a1b2c3d": COUNTS for number in range(RESPONSES)},
        "counters": {"draft/failures": 0, "draft/bytes": 8},
    }


def finished(number: int) -> FinishedRequest:
    prompt = [number, 7]
    sam = identify(prompt, seed=1, step=STEP, sibling=0, split="train").to_extra_args()
    identity = RequestIdentity.from_extra_args(sam) if number else None
    return FinishedRequest(f"request-{number}", identity, prompt, [4, 5, 6], 1.0, 3.0, "stop")


def drained(*workers: dict | None):
    recorder = EngineStepRecorder()
    recorder.work_arrived()
    recorder.record(scheduler(running=3), progress(decoding=3, tokens=9))
    requests = [finished(number) for number in range(RESPONSES)]
    place = Place(STEP, "train", replica=5)
    return join_records(place, recorder, workers, time.monotonic(), requests, traced=True)


def test_an_engines_steps_and_requests_meet_what_its_drafter_counted():
    found = drained(worker(), None)  # the second rank has no draft session
    (step,) = found.engine_steps.to_pylist()
    assert (step["step"], step["split"], step["replica"]) == (STEP, "train", 5)
    assert step["generation_tokens"] == 9 and step["draft_budget"] == 3
    for number, row in enumerate(found.requests.to_pylist()):
        assert (row["verify_steps"], row["drafted_tokens"], row["accepted_tokens"]) == COUNTS[:3]
        assert (row["prompt_tokens"], row["response_tokens"]) == (2, 3)
        assert row["group"] == group_of([number, 7])
    assert found.traces["response_ids"].to_pylist() == [[4, 5, 6]] * RESPONSES
    assert found.drafter_counters["draft/bytes"] == 8


@pytest.fixture
def baseline(tmp_path) -> RunFolder:
    folder = RunFolder(tmp_path / "base")
    folder.write_start(RunInfo("sam=off", {}, {}, {}, {}, "2026-07-01T00:00:00+00:00"))
    folder.append_train_step(STEP, {"sam/engine/rollout_s": 6.0, "timing_s/step": 8.0})
    return folder


@pytest.fixture
def folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path / "run")


@pytest.fixture
def records(folder, baseline) -> StepRecords:
    compare = CompareConfig(baseline_run=str(baseline.path))
    return StepRecords(RunConfig(compare=compare), folder)


def fails(*_arguments, **_keywords):
    raise OSError("no space left")


def test_records_that_are_lost_cost_no_training_and_are_missed(records, caplog):
    records.collect(STEP - 1, "train", lambda: [drained(worker())])
    assert records.collect(STEP, "train", fails) == {} == records.collect(STEP, "val", fails)
    assert f"step {STEP} are lost" in caplog.text and records.engine_steps == []
    metrics, told = {"response_length/mean": 4.0}, []
    records.complete(STEP, metrics, lambda title, text: told.append((title, text)))
    assert metrics["sam/sentinel/counters_missing"] == 1
    ((title, text),) = told
    assert title == "sam_rollout: counters_missing" and text.startswith(f"training step {STEP}: ")
    records.complete(STEP, metrics, lambda title, text: told.append((title, text)))
    assert len(told) == 1, "said once"
    assert caplog.text.count("Sentinel, training step") == 1


def test_a_response_that_validation_left_without_engine_steps_is_not_missed(records):
    left = drained(worker())
    left.engine_steps = left.engine_steps.slice(0, 0)
    records.collect(STEP, "val", lambda: [drained(worker())])
    for start_s, missed in ((1.0, 0), (time.time() + 60, 1)):
        rows = [{**row, "start_s": start_s} for row in left.requests.to_pylist()]
        left.requests = left.requests.from_pylist(rows, left.requests.schema)
        records.collect(STEP, "train", lambda: [left])
        records.complete(STEP, metrics := {}, lambda title, text: None)
        assert metrics["sam/sentinel/counters_missing"] == missed


def test_a_step_is_laid_beside_the_baselines_and_kept(records, folder):
    metrics = {"sam/engine/rollout_s": 3.0, "timing_s/step": 4.0, "a table": object()}
    records.complete(STEP, metrics, print)
    records.write(STEP, metrics)
    assert metrics["compare/speedup_rollout"] == metrics["compare/speedup_step"] == 2.0
    del metrics["a table"]
    assert folder.read_train_steps()[STEP] == metrics


def test_what_fails_costs_its_own_metrics_alone(records, folder, monkeypatch, caplog):
    metrics = {"sam/engine/rollout_s": 3.0, "response_length/mean": 4.0}
    with caplog.at_level(logging.WARNING):
        records.complete(STEP, metrics, fails)
        monkeypatch.setattr(folder, "append_train_step", fails)
        records.write(STEP, metrics)
    assert metrics["compare/speedup_rollout"] == 2.0
    assert not any("sentinel" in name for name in metrics)
    for said in ("The sentinel did not check", "is not in the run folder"):
        assert said in caplog.text
