import pytest

from sam_rollout.integrations.vllm.serving import step_recorder
from sam_rollout.integrations.vllm.serving.step_recorder import EngineStepRecorder, on_this_clock
from sam_rollout.telemetry.progress import EngineProgress
from sam_rollout.telemetry.records import NOTE_COLUMNS, DraftNote
from tests.records import engine_step, engine_steps
from tests.unit.integrations.vllm.engine_stats import progress, scheduler

UNIX_OFFSET_S = 1_000_000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def time(self) -> float:
        return self.now_s + UNIX_OFFSET_S


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(step_recorder, "time", clock)
    return clock


def drained(recorder, session_steps=None, split="train"):
    table = recorder.drain(step=4, split=split, replica=1, session_steps=session_steps)
    return table.to_pylist()


def note(*, gate_open: bool = True, drafter_us: float = 5.0, **columns) -> DraftNote:
    budget = 3 if gate_open else 0
    return DraftNote(gate_open=gate_open, drafter_us=drafter_us, draft_budget=budget, **columns)


def notes(*rows: tuple[float, DraftNote]) -> dict[str, list]:
    columns = {name: [getattr(one, name) for _, one in rows] for name in NOTE_COLUMNS}
    return {"noted_s": [noted_s for noted_s, _ in rows], **columns}


def record_at(recorder, clock, *times_s: float, **told) -> None:
    for clock.now_s in times_s:
        recorder.record(scheduler(**told), progress())


WORK, PAUSE = "work", "pause"  # PAUSE interrupts all requests


@pytest.mark.parametrize(
    ("events", "durations"),
    [
        (
            [(100, WORK), (100.5, {}), (100.5, WORK), (101.5, {"running": 0}),
             (200, WORK), (201, WORK), (203, {})],
            [0.5, 1.0, 3.0],
        ),
        ([(100, WORK), (101, {"running": 0, "waiting": 3}), (105, {})], [1.0, 4.0]),
        ([(150, {})], [0.0]),
        ([(100, WORK), (101, {"running": 3}), (101, PAUSE), (140, WORK), (142, {})], [1.0, 2.0]),
    ],
    ids=[
        "since the last one or since work arrived", "waiting is no idleness", "unannounced",
        "an interruption is no step",
    ],
)  # fmt: skip
def test_how_long_a_step_lasts(clock, events, durations):
    recorder = EngineStepRecorder()
    for clock.now_s, event in events:
        if event == WORK:
            recorder.work_arrived()
        elif event == PAUSE:
            recorder.paused()
        else:
            recorder.record(scheduler(**event), progress())
    assert [row["duration_s"] for row in drained(recorder)] == durations


def test_columns_come_from_the_engines_statistics(clock):
    recorder = EngineStepRecorder()
    recorder.work_arrived()
    clock.now_s = 102.0
    recorder.record(
        scheduler(running=5, waiting=2, accepted=(2, 1, 0)), progress(joining=1, decoding=3)
    )
    expected = engine_step(
        step=4, replica=1, time_s=102.0 + UNIX_OFFSET_S, duration_s=2.0, scheduled=4, running=5,
        waiting=2, prompt_tokens=7, generation_tokens=1, draft_requests=2, draft_tokens=6,
        accepted_tokens=3, accepted_per_position=[2, 1, 0],
    )  # fmt: skip
    assert drained(recorder) == engine_steps(expected).to_pylist()


def test_draining_starts_anew_and_follows_a_hosts_time_that_was_set(clock, monkeypatch):
    recorder = EngineStepRecorder()
    record_at(recorder, clock, 101.0)
    monkeypatch.setattr(clock, "time", lambda: clock.now_s + UNIX_OFFSET_S + 60)
    (row,) = drained(recorder, split="val")
    assert (row["split"], row["time_s"]) == ("val", 101.0 + UNIX_OFFSET_S + 60)
    assert drained(recorder) == []
    record_at(recorder, clock, 102.0)
    assert [row["split"] for row in drained(recorder)] == ["train"]


@pytest.mark.parametrize("heard_s", [(101.0, 102.0, 103.0), (102.5, 102.6, 103.0)])
def test_the_sessions_half_finds_its_step(clock, heard_s):
    recorder = EngineStepRecorder()
    record_at(recorder, clock, *heard_s)
    when = ((100.9, note(gate_open=False)), (101.9, note(drafter_us=6.0)))
    rows = drained(recorder, notes(*when, (102.9, note(drafter_us=7.0))))
    assert [row["gate_open"] for row in rows] == [False, True, True]
    assert [row["drafter_us"] for row in rows] == [5.0, 6.0, 7.0]


def test_progress_is_what_happened_since_the_last_drain(clock):
    recorder = EngineStepRecorder()
    assert recorder.progress() == EngineProgress()
    recorder.record(scheduler(running=5, waiting=2, accepted=(2, 1, 0)), progress(tokens=7))
    recorder.record(scheduler(running=4, waiting=0, accepted=(1, 1, 1)), progress(tokens=5))
    assert recorder.progress() == EngineProgress(
        running=4, tokens=12, draft_requests=4, accepted_tokens=6, engines=1, drafting=1
    )
    drained(recorder)
    assert recorder.progress() == EngineProgress()


def test_what_the_session_verified_counts_whatever_the_engine_says(clock):
    recorder = EngineStepRecorder()
    record_at(recorder, clock, 101.0, 102.0, 103.0, accepted=(2, 1, 1))
    drafts = {"draft_requests": 1, "draft_tokens": 2, "accepted_tokens": 1}
    lists = {"accepted_per_position": [1, 0, 0], "drafted_per_source": [0, 2, 0, 0]}
    rows = drained(
        recorder, notes((100.9, note(**drafts, **lists)), (102.9, note(gate_open=False)))
    )
    counted = [(row["draft_requests"], row["draft_tokens"], row["accepted_tokens"]) for row in rows]
    assert counted == [(1, 2, 1), (0, 0, 0), (0, 0, 0)], "the second step was not noted"
    assert [row["accepted_per_position"] for row in rows] == [[1, 0, 0], [], []]
    assert [row["drafted_per_source"] for row in rows] == [[0, 2, 0, 0], [], []]
    assert [row["gate_open"] for row in rows] == [True, False, False]
    assert [row["draft_budget"] for row in rows] == [3, 0, 0]


@pytest.mark.parametrize("booted_earlier_s", [-1e6, 1e6])
def test_steps_of_another_host_come_by_this_hosts_clock(clock, booted_earlier_s):
    recorder = EngineStepRecorder()
    recorder.work_arrived()
    record_at(recorder, clock, 101.0, 102.0)
    times = (100.9 + booted_earlier_s, 101.9 + booted_earlier_s)
    there = notes((times[0], note(drafter_us=5.0)), (times[1], note(drafter_us=6.0)))
    answer = {"steps": there, "host": "elsewhere", "clock_s": 103.01 + booted_earlier_s}
    rows = drained(recorder, on_this_clock(answer, asked_s=103.0))
    assert [row["drafter_us"] for row in rows] == [5.0, 6.0]
    assert there["noted_s"] == list(times), "the answer is left as it is"


def test_work_that_went_to_another_engine_starts_no_step(clock):
    recorder = EngineStepRecorder()
    recorder.work_arrived()
    assert drained(recorder) == []
    clock.now_s = 4000.0
    recorder.work_arrived()
    record_at(recorder, clock, 4001.0)
    assert [row["duration_s"] for row in drained(recorder)] == [1.0]
