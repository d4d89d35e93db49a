"""The source `history`: whose past is drafted from, what is kept, and what a bad disk costs."""

from concurrent.futures import Executor, Future

import numpy as np
import pytest

from sam_rollout.settings import ConfigError
from sam_rollout.sources import UNKNOWN_VOCABULARY, Limits, history
from sam_rollout.sources.history import HistorySource, HistorySourceConfig
from sam_rollout.sources.support.history_store import HistoryStore
from tests.unit.drafting.texts import WIDTH, draft_from, identity


class AtOnce(Executor):
    """Does everything when it is handed over."""

    def submit(self, task, *arguments):
        future = Future()
        try:
            future.set_result(task(*arguments))
        except Exception as error:
            future.set_exception(error)
        return future


class Later(AtOnce):
    """Does nothing before it is told to."""

    def __init__(self):
        self.tasks = []

    def submit(self, task, *arguments):
        future = Future()
        self.tasks.append((future, task, arguments))
        return future

    def work(self):
        tasks, self.tasks = self.tasks, []
        for future, task, arguments in tasks:
            future.set_result(task(*arguments))


def make_source(folder, max_rows=8, executor=None, **settings):
    config = HistorySourceConfig(enabled=True, path=str(folder), **settings)
    return HistorySource(config, Limits(max_rows, WIDTH), executor or AtOnce())


class Engine:
    """Drives a source as the drafter does; requests are (identity, prompt, response)."""

    def __init__(self, source):
        self.source = source
        self.ids = []

    def step(self, requests, texts):
        """One step; `texts` are the known tokens. Returns what `draft_from` does."""
        if list(requests) != self.ids:
            self.source.bind(list(requests), list(requests.values()))
            self.ids = list(requests)
        return draft_from(self.source, texts)

    def finish(self, *request_ids):
        self.source.finish(request_ids)
        self.ids = None

    def respond(self, name, who, prompt, response):
        """A request from its first step to its end, two tokens a step."""
        for end in range(1, len(response) + 1, 2):
            self.step({name: who}, [prompt + response[:end]])
        self.step({name: who}, [prompt + response])
        self.finish(name)


PROMPT = list(range(100, 120))
RESPONSE = list(range(200, 260))


def test_the_next_epoch_drafts_from_the_last_one(tmp_path):
    engine = Engine(make_source(tmp_path))
    engine.respond("a", identity(step=1), PROMPT, RESPONSE)
    engine.source.end_step()
    # At the first token already: a few tokens of the prompt are kept with the response.
    (first,) = engine.step({"b": identity(step=2)}, [PROMPT + RESPONSE[:1]])
    assert first == (9, RESPONSE[1:4])
    (later,) = engine.step({"b": identity(step=2)}, [PROMPT + RESPONSE[:20]])
    assert later == (28, RESPONSE[20:23])
    assert engine.step({"c": identity("other", step=2)}, [PROMPT + RESPONSE[:20]]) == [(0, [])]
    counters, levels = engine.source.counters(), engine.source.levels()
    assert counters["history_groups_found"] == 1
    assert counters["history_groups_missing"] == 2
    assert levels["history_bytes"] > 0 and levels["history_disk_bytes"] > 4 * 60
    of_texts = engine.source.usage().bytes - levels["history_bytes"]
    assert of_texts >= 4 * len(RESPONSE), "what requests write is kept until the disk has it"


def test_the_current_step_is_not_history(tmp_path):
    engine = Engine(make_source(tmp_path))
    engine.respond("a", identity(step=5), PROMPT, RESPONSE)
    for step in (4, 5):  # a resumed run may come to earlier steps again
        engine.source.end_step()
        ((_, draft),) = engine.step({"b": identity(step=step)}, [PROMPT + RESPONSE[:9]])
        assert draft == []
        engine.finish("b")
    engine.source.end_step()
    found = engine.step({"b": identity(step=6)}, [PROMPT + RESPONSE[:9]])
    assert found == [(17, RESPONSE[9:12])]


def test_a_restart_and_another_engine_see_the_same_history(tmp_path):
    Engine(make_source(tmp_path)).respond("a", identity(step=1), PROMPT, RESPONSE)
    other = Engine(make_source(tmp_path))
    other.respond("b", identity(step=1, sibling=1), PROMPT, RESPONSE[::-1])
    again = Engine(make_source(tmp_path))
    requests = {"c": identity(step=2), "d": identity(step=2, sibling=1)}
    texts = [PROMPT + RESPONSE[:9], PROMPT + RESPONSE[::-1][:9]]
    assert [draft for _, draft in again.step(requests, texts)] == [
        RESPONSE[9:12],
        RESPONSE[::-1][9:12],
    ]
    assert again.source.counters()["history_groups_found"] == 1  # read once for both


@pytest.mark.parametrize(
    "who", [None, identity(split="val"), identity(step=-1)], ids=["nobody", "val", "no step"]
)
def test_other_traffic_is_neither_stored_nor_drafted_for(tmp_path, who):
    engine = Engine(make_source(tmp_path))
    engine.respond("a", who, PROMPT, RESPONSE)
    assert not list(tmp_path.glob("0*"))
    engine.respond("b", identity(step=1), PROMPT, RESPONSE)
    assert engine.step({"c": who}, [PROMPT + RESPONSE[:9]]) == [(0, [])]


def test_reading_and_building_never_keep_a_step_waiting(tmp_path):
    Engine(make_source(tmp_path)).respond("a", identity(step=1), PROMPT, RESPONSE)
    executor = Later()
    engine = Engine(make_source(tmp_path, executor=executor))
    requests, texts = {"b": identity(step=2)}, [PROMPT + RESPONSE[:9]]
    assert engine.step(requests, texts) == [(0, [])]
    executor.work()
    assert engine.step(requests, texts) == [(17, RESPONSE[9:12])]


def test_a_group_that_ends_before_its_history_is_there(tmp_path):
    Engine(make_source(tmp_path)).respond("a", identity(step=1), PROMPT, RESPONSE)
    executor = Later()
    engine = Engine(make_source(tmp_path, executor=executor))
    engine.step({"b": identity(step=2)}, [PROMPT + RESPONSE[:9]])
    engine.finish("b")
    engine.source.end_step()
    executor.work()
    assert engine.step({"c": identity("other", step=2)}, [PROMPT]) == [(0, [])]
    assert engine.source.levels()["history_bytes"] == 0


def test_groups_are_freed_with_the_step(tmp_path):
    engine = Engine(make_source(tmp_path))
    engine.respond("a", identity(step=1), PROMPT, RESPONSE)
    engine.step({"b": identity(step=2)}, [PROMPT + RESPONSE[:9]])
    engine.source.end_step()
    assert engine.source.levels()["history_bytes"] > 0  # b lives
    engine.finish("b")
    assert engine.source.levels()["history_bytes"] > 0  # siblings may come
    engine.source.end_step()
    assert engine.source.levels()["history_bytes"] == 0


def test_memory_is_bounded_and_the_live_groups_stay(tmp_path):
    rng = np.random.default_rng(0)
    engine = Engine(make_source(tmp_path, max_memory_bytes=1 << 20))
    names = [f"group-{i}" for i in range(16)]
    responses = {name: rng.integers(0, 1000, 4000).tolist() for name in names}
    for name in names:
        engine.step({name: identity(name)}, [PROMPT + responses[name][:1]])
        engine.step({name: identity(name)}, [PROMPT + responses[name]])
        engine.finish(name)
    engine.source.end_step()
    live = {"group-0": identity("group-0", step=2)}
    engine.step(live, [PROMPT + responses["group-0"][:50]])
    for name in names[1:]:
        requests = {**live, name: identity(name, step=2)}
        texts = [PROMPT + responses[request][:60] for request in requests]
        found = engine.step(requests, texts)
        assert [draft for _, draft in found] == [responses[request][60:63] for request in requests]
        engine.finish(name)
        assert engine.source.levels()["history_bytes"] <= 1 << 20
    assert engine.source.counters()["history_evictions"] >= 8


def test_a_group_larger_than_the_memory_keeps_its_newest_responses(tmp_path):
    rng = np.random.default_rng(0)
    writer = HistoryStore(tmp_path, 1 << 24, 16, UNKNOWN_VOCABULARY)
    responses = [rng.integers(0, 1000, 10_000).astype(np.int32) for _ in range(8)]
    for step, response in enumerate(responses):
        writer.append("g", step, response)
    engine = Engine(make_source(tmp_path, max_memory_bytes=1 << 20))
    found = engine.step(
        {"first": identity(step=9), "last": identity(step=9, sibling=1)},
        [responses[0][:50].tolist(), responses[-1][:50].tolist()],
    )
    assert found[0][0] < 5 and found[1] == (50, responses[-1][50:53].tolist())
    assert 0 < engine.source.levels()["history_bytes"] <= 1 << 20


def test_a_response_with_the_largest_token_id_is_left_out(tmp_path):
    """It is the id that parts joined responses: the others are drafted from, and none fails."""
    engine = Engine(make_source(tmp_path))
    largest = [2**31 - 1 if token == 230 else token for token in RESPONSE]
    engine.respond("a", identity(step=1), PROMPT, largest)
    engine.respond("b", identity(step=1, sibling=1), PROMPT, RESPONSE)
    found = engine.step({"c": identity(step=2)}, [PROMPT + RESPONSE[:9]])
    assert found == [(17, RESPONSE[9:12])]
    engine.finish("c")
    engine.source.end_step()
    assert engine.step({"d": identity(step=3)}, [PROMPT + largest[:35]]) == [(4, RESPONSE[35:38])]
    assert engine.source.counters()["history_failures"] == 0


def break_disk(monkeypatch, method):
    def fail(self, *arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(HistoryStore, method, fail)


@pytest.mark.parametrize("method", ["append", "refresh", "__init__"])
def test_a_disk_that_fails_switches_the_source_off(tmp_path, monkeypatch, caplog, method):
    Engine(make_source(tmp_path)).respond("a", identity(step=1), PROMPT, RESPONSE)
    break_disk(monkeypatch, method)
    engine = Engine(make_source(tmp_path))
    for name in "bcd":
        engine.respond(name, identity(step=2), PROMPT, RESPONSE)
    found = engine.step({"e": identity(step=3)}, [PROMPT + RESPONSE[:9]])
    assert found == [(0, [])]
    counters = engine.source.counters()
    assert counters["history_failures"] == 1
    assert engine.source.levels()["history_bytes"] == 0
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "the rollout continues without it" in caplog.text


def test_a_path_that_cannot_be_a_folder_switches_the_source_off(tmp_path):
    (tmp_path / "file").write_text("")
    engine = Engine(make_source(tmp_path / "file" / "history"))
    engine.respond("a", identity(step=1), PROMPT, RESPONSE)
    assert engine.source.counters()["history_failures"] == 1


def test_a_slow_disk_drops_responses_instead_of_keeping_them(tmp_path, monkeypatch):
    monkeypatch.setattr(history, "_MAX_WAITING_BYTES", 1000)
    executor = Later()
    engine = Engine(make_source(tmp_path, executor=executor))
    for number in range(9):
        engine.respond(f"r{number}", identity(step=1, sibling=number), PROMPT, RESPONSE)
    assert engine.source.counters()["history_dropped"] == 6  # 69 tokens each: three fit
    executor.work()
    engine.respond("last", identity(step=1), PROMPT, RESPONSE)
    executor.work()
    reader = HistoryStore(tmp_path, 1 << 24, 16, UNKNOWN_VOCABULARY)
    reader.refresh()
    assert len(reader.read("g", 9, 1 << 20)) == 4


def test_preempted_requests_are_recorded_whole(tmp_path):
    engine = Engine(make_source(tmp_path, max_rows=2))
    a, b = identity(step=1), identity("h", step=1)
    engine.step({"a": a, "b": b}, [PROMPT + RESPONSE[:1], PROMPT + RESPONSE[:1]])
    engine.step({"b": b}, [PROMPT + RESPONSE[:30]])
    engine.step({"b": b, "a": a}, [PROMPT + RESPONSE[:31], PROMPT + RESPONSE[:20]])
    engine.finish("b", "a", "never seen")
    reader = HistoryStore(tmp_path, 1 << 24, 16, UNKNOWN_VOCABULARY)
    reader.refresh()
    assert reader.read("g", 9, 1000)[0].tolist() == PROMPT[-8:] + RESPONSE[:20]
    assert reader.read("h", 9, 1000)[0].tolist() == PROMPT[-8:] + RESPONSE[:31]


@pytest.mark.timeout(60)
def test_with_a_thread_of_its_own(tmp_path):
    config = HistorySourceConfig(enabled=True, path=str(tmp_path))
    first = HistorySource(config, Limits(8, WIDTH))
    Engine(first).respond("a", identity(step=1), PROMPT, RESPONSE)
    first.wait()
    second = Engine(HistorySource(config, Limits(8, WIDTH)))
    requests, texts = {"b": identity(step=2)}, [PROMPT + RESPONSE[:9]]
    second.step(requests, texts)
    second.source.wait()
    assert second.step(requests, texts) == [(17, RESPONSE[9:12])]


def test_a_path_is_needed():
    with pytest.raises(ConfigError, match=r"sam\.sources\.history\.path = '': must name a folder"):
        HistorySource(HistorySourceConfig(enabled=True), Limits(8, WIDTH))
