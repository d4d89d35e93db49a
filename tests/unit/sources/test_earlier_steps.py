import dataclasses

import numpy as np
import pytest

from sam_rollout.automaton.recorder import CONTEXT
from sam_rollout.core.limits import UNKNOWN_VOCABULARY
from sam_rollout.sources.contract import Piece
from sam_rollout.sources.support import responses, text_moves
from sam_rollout.sources.support.text_store import Text, TextStore
from tests.unit.drafting.texts import (
    Later,
    counter,
    drafter_of,
    enter,
    groups,
    identity,
    leave,
    step,
)

PROMPT = list(range(100, 120))
RESPONSE = list(range(200, 260))


def make_drafter(folder, *, max_rows=8, longest=1 << 20, executor=None, **options):
    drafter = drafter_of(path=folder, max_rows=max_rows, longest=longest, prompt=options)
    if executor is not None:
        drafter.responses._executor = executor
    return drafter


def responded(drafter, name, who, text=RESPONSE, prompt=PROMPT):
    if who:
        drafter.admit(name, who)
    for end in (1, 3, len(text)):
        step(drafter, {name: prompt + text[:end]})
    leave(drafter, [name])
    drafter.wait()


def continued(drafter, name, who, text):
    enter(drafter, name, who, text[:1])
    drafter.wait()
    step(drafter, {name: text})
    return step(drafter, {name: text})[name]


def kept(folder, group="g"):
    reader = TextStore(folder, 1 << 26, 16, UNKNOWN_VOCABULARY)
    return [text.tolist() for text in reader.read(group, 9, 1 << 20)]


def test_the_next_epoch_drafts_from_the_last_one(tmp_path):
    drafter = make_drafter(tmp_path)
    responded(drafter, "a", identity(step=1))
    assert continued(drafter, "b", identity(step=2), PROMPT + RESPONSE[:1]) == RESPONSE[1:4]
    text = [7, *RESPONSE[18:20]]
    assert enter(drafter, "c", identity(step=2, sibling=1), text) == RESPONSE[20:23]
    assert continued(drafter, "d", identity("other", step=2), RESPONSE[:20]) == []
    assert counter(drafter, "earlier_found") == 1, "read once for both"
    assert counter(drafter, "earlier_missing") >= 1
    leave(drafter, "bcd")
    assert groups(drafter) == counter(drafter, "prompt_bytes") == 0


def test_a_restart_and_another_engine_see_the_same_folder(tmp_path):
    responded(make_drafter(tmp_path), "a", identity(step=1))
    responded(make_drafter(tmp_path), "b", identity(step=1, sibling=1), RESPONSE[::-1])
    again = make_drafter(tmp_path)
    for text in (RESPONSE, RESPONSE[::-1]):
        assert continued(again, str(text), identity(step=2), text[:9]) == text[9:12]


@pytest.mark.parametrize(
    "who", [None, identity(split="val"), identity(step=-1)], ids=["nobody", "val", "no step"]
)
def test_other_traffic_is_neither_kept_nor_drafted_for(tmp_path, who):
    drafter = make_drafter(tmp_path)
    responded(drafter, "a", who)
    assert not list(tmp_path.glob("*.texts"))
    responded(drafter, "b", identity(step=1))
    assert continued(drafter, "c", who, RESPONSE[:9]) == []


def test_an_interrupted_response_is_kept_once_and_its_siblings_meanwhile(tmp_path):
    drafter = make_drafter(tmp_path)
    ended, cut = identity(step=1), identity(step=1, sibling=1)
    cut = dataclasses.replace(cut, prompt_tokens=len(PROMPT))
    drafter.admit("a", ended)
    drafter.admit("b", cut)
    other = [300, *RESPONSE[1:]]
    for end in (1, 20):
        step(drafter, {"a": PROMPT + RESPONSE[:end], "b": PROMPT + other[:end]})
    drafter.finish(["a"])
    drafter.responses.interrupted = {cut.key: cut.group_key}
    leave(drafter, ["b"])
    drafter.responses.interrupted = {}
    drafter.admit("c", cut)
    assert groups(drafter) == 1
    drafts = step(drafter, {"c": PROMPT + other[:10]})["c"]
    assert drafts == other[10:13], "its siblings' texts are there"
    step(drafter, {"c": PROMPT + other})
    leave(drafter, ["c"])
    drafter.wait()
    assert groups(drafter) == 0
    texts = sorted(text[-len(other) :] for text in kept(tmp_path))
    assert [len(text) for text in texts] == [20 + CONTEXT, len(other)]
    assert texts[1] == other


def test_without_earlier_steps_nothing_is_read(tmp_path):
    responded(make_drafter(tmp_path), "a", identity(step=1))
    drafter = make_drafter(tmp_path, earlier_steps=False)
    assert continued(drafter, "b", identity(step=2), RESPONSE[:9]) == []


def test_no_engine_step_waits_for_the_disk_and_live_requests_move_bit_by_bit(tmp_path, monkeypatch):
    monkeypatch.setattr(text_moves, "TOKENS_PER_STEP", 100)
    responded(make_drafter(tmp_path), "a", identity(step=1))
    executor = Later()
    drafter = make_drafter(tmp_path, executor=executor)
    live = np.random.default_rng(0).permutation(1000).tolist()
    text = [*live, *live[20:24]]
    assert enter(drafter, "b", identity(step=2), text) == live[24:27], "as without earlier steps"
    executor.work()
    step(drafter, {"b": text})
    for _ in range(12):
        before = drafter.usage().catch_up_tokens
        assert step(drafter, {"b": text})["b"] == live[24:27], "no step is without drafts"
        assert drafter.usage().catch_up_tokens - before <= 100
    text += RESPONSE[20:24]
    assert step(drafter, {"b": text})["b"] == RESPONSE[24:27]
    assert groups(drafter) == 1


def test_a_group_that_ends_before_its_responses_are_read(tmp_path):
    responded(make_drafter(tmp_path), "a", identity(step=1))
    executor = Later()
    drafter = make_drafter(tmp_path, executor=executor)
    enter(drafter, "b", identity(step=2), RESPONSE[:9])
    leave(drafter, ["b"])
    executor.work()
    assert executor.done == 1, "what b wrote goes to the disk; nobody asks for its past any more"
    assert enter(drafter, "c", identity("other", step=2), RESPONSE[:9]) == []
    leave(drafter, ["c"])
    assert counter(drafter, "prompt_bytes") == 0


@pytest.mark.parametrize("elsewhere", [False, True])
def test_siblings_that_ended_in_this_step_outlive_earlier_responses(tmp_path, elsewhere):
    texts = np.random.default_rng(0).permutation(40_000).reshape(10, 4000).tolist()
    writer = make_drafter(tmp_path)
    for text in texts[:3]:
        responded(writer, "w", identity(step=1), text)
    executor = Later()
    drafter = make_drafter(tmp_path, executor=executor, longest=8192, max_bytes=1 << 20)
    live, ended = [7, 8], texts[3][:3900]
    enter(drafter, "live", identity(step=2), live)
    if elsewhere:
        drafter.exchange("y", [])
        told = np.array(ended, "<i4").tobytes()
        drafter.exchange("y", [Piece("train", 2, "g", "x/1", 0, True, told)])
    else:
        drafter.admit("ended", identity(step=2, sibling=1))
        for end in (1, 3900):
            step(drafter, {"live": live, "ended": ended[:end]})
        drafter.finish(["ended"])
    for _ in range(9):
        step(drafter, {"live": live})
    executor.work()
    for _ in range(9):
        step(drafter, {"live": live})
    assert counter(drafter, "earlier_found") == 1
    for text in (ended, texts[2]):
        assert step(drafter, {"live": [*live, *text[50:54]]})["live"] == text[54:57]
    for number in range(6):  # other requests need the memory
        drafter.admit(f"r{number}", identity(f"h{number}", step=2))
        step(drafter, {f"r{number}": texts[4 + number][:3900], "live": live})
    for _ in range(9):
        step(drafter, {"live": live})
    assert counter(drafter, "earlier_evictions") == 1
    assert drafter.sources[0]._ended_bytes == 0, "no automaton reads it again"
    assert step(drafter, {"live": [*live, *ended[50:54]]})["live"] == ended[54:57]
    assert step(drafter, {"live": [*live, *texts[2][50:54]]})["live"] == []
    leave(drafter, ["live", *(f"r{number}" for number in range(6))])
    assert counter(drafter, "prompt_bytes") == 0 and len(drafter.sources[0].pool) == 0


def test_what_is_read_of_one_prompt_is_bounded_and_the_newest(tmp_path):
    rng = np.random.default_rng(0)
    writer = TextStore(tmp_path, 1 << 26, 16, UNKNOWN_VOCABULARY)
    texts = [rng.integers(0, 1000, 3000).astype(np.int32) for _ in range(8)]
    writer.write([Text("g", number, text) for number, text in enumerate(texts)])
    drafter = make_drafter(tmp_path, max_bytes=1 << 20)
    first, last = texts[0][:50].tolist(), texts[-1][:50].tolist()
    assert continued(drafter, "a", identity(step=9), first)[:1] != [texts[0][50]]
    drafter.admit("b", identity(step=9, sibling=1))
    assert step(drafter, {"a": first, "b": last})["b"] == texts[-1][50:53].tolist()
    assert drafter.sources[0]._nbytes <= 1 << 20


def test_a_slow_disk_drops_responses_instead_of_keeping_them(tmp_path, monkeypatch):
    monkeypatch.setattr(responses, "MOST_WAITING_BYTES", 1000)
    executor = Later()
    drafter = make_drafter(tmp_path, executor=executor)
    for number in range(9):
        drafter.admit("r", identity(step=1, sibling=number))
        for end in (1, len(RESPONSE)):
            step(drafter, {"r": PROMPT + RESPONSE[:end]})
        drafter.finish(["r"])
    drafter.end_step()
    executor.work()
    assert len(kept(tmp_path)) == 3, "68 tokens each: three fit"


def test_preempted_requests_are_kept_whole(tmp_path):
    drafter = make_drafter(tmp_path, max_rows=2)
    for name, group in (("a", "g"), ("b", "h")):
        drafter.admit(name, identity(group, step=1))
    step(drafter, {"a": PROMPT + RESPONSE[:1], "b": PROMPT + RESPONSE[:1]})
    step(drafter, {"b": PROMPT + RESPONSE[:30]})
    step(drafter, {"b": PROMPT + RESPONSE[:31], "a": PROMPT + RESPONSE[:20]})
    leave(drafter, ["b", "a", "never seen"])
    drafter.wait()
    assert kept(tmp_path) == [PROMPT[-8:] + RESPONSE[:20]]
    assert kept(tmp_path, "h") == [PROMPT[-8:] + RESPONSE[:31]]


@pytest.mark.parametrize("method", ["write", "refresh"])
def test_a_failing_disk_costs_one_warning(tmp_path, monkeypatch, caplog, method):
    def fail(self, *arguments):
        raise OSError(28, "No space left on device")

    responded(make_drafter(tmp_path), "a", identity(step=1))
    monkeypatch.setattr(TextStore, method, fail)
    drafter = make_drafter(tmp_path)
    for name in "bcd":
        responded(drafter, name, identity(step=2))
    drafter.admit("e", identity(step=3))
    drafter.admit("f", identity(step=3, sibling=1))
    found = step(drafter, {"e": RESPONSE, "f": RESPONSE[:9]})
    assert found["f"] == RESPONSE[9:12], "drafted from the sibling's text"
    assert counter(drafter, "texts_failures") == 1
    assert [r.levelname for r in caplog.records] == ["WARNING"]
    assert "the rollout continues without" in caplog.text


@pytest.mark.parametrize("source", [{"run": {"when": "always"}}, {"prompt": {}}])
def test_texts_of_a_larger_vocabulary_are_dropped_and_named_once(source, tmp_path, caplog):
    foreign, known = list(range(5000, 5200)), list(range(100, 300))
    mixed = [*known[:150], 5000, *range(400, 440)]
    before = drafter_of(path=tmp_path, vocabulary=1 << 20, **source)
    for number, text in enumerate((foreign, known, mixed), start=1):
        responded(before, f"r{number}", identity(step=number), text, prompt=[])
    again = drafter_of(path=tmp_path, vocabulary=512, **source)
    enter(again, "a", identity(step=9), [7])
    again.wait()
    step(again, {"a": [7, 7]})
    again.admit("b", identity(step=9))
    found = step(again, {"a": [7, 7, *known[50:54]], "b": [7, *mixed[155:165]]})
    assert found == {"a": known[54:57], "b": []}
    assert counter(again, "refused_texts") == 2 and counter(again, "unknown_tokens") == 0
    (warning,) = caplog.messages
    for part in (str(tmp_path), "another model", "the model has 512"):
        assert part in warning
    assert counter(again, "texts_failures") == 0
