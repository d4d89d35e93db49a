import gc
import logging
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from sam_rollout.config import GateConfig, SourcesConfig
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.gating.gate import LOOK
from sam_rollout.session.adapter import EngineHooks
from sam_rollout.session.made_drafts import MadeDrafts
from sam_rollout.sources import NAMES
from sam_rollout.sources.model import ModelSourceConfig
from sam_rollout.sources.prompt import PromptTexts
from sam_rollout.telemetry.records import NOTE_COLUMNS, RequestTotals
from tests.records import by_source
from tests.unit.drafting.texts import groups
from tests.unit.gating.steps import decode
from tests.unit.session.engine import (
    MAX_LENGTH,
    MAX_ROWS,
    PERIOD,
    START,
    THRESHOLD,
    Engine,
    K,
    next_of_period,
    on_record,
)

LOGGER = "sam_rollout.session"


def warnings_of(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith(LOGGER)]


def test_a_closed_gate_drafts_nothing_but_keeps_reading():
    engine = Engine("a", "b", "c")
    assert engine.step("a", "b", "c") == [[], [], []]
    assert engine.counter("catch_up_tokens") == sum(map(len, engine.texts.values()))
    assert engine.step("a") == [next_of_period(engine.texts["a"])]
    assert engine.counter("catch_up_tokens") == 1, "only the new token was left to read"


def test_the_gates_budget_bounds_every_draft():
    engine = Engine("a", "b", "c", gate=GateConfig(kind="schedule", schedule={1: 3, 2: 1}))
    assert list(map(len, engine.step("a", "b", "c"))) == [0, 0, 0]
    assert list(map(len, engine.step("a", "b"))) == [1, 1]
    assert list(map(len, engine.step("a"))) == [3]


def test_the_gate_sees_what_became_of_its_drafts():
    engine = Engine("a", "b")
    gate = on_record(engine)
    engine.step("a", "b")
    engine.step("b", "a", sampled=3)
    engine.go_on({"b": [99], "a": [99]})
    assert [step.same_batch for step in gate.seen] == [False, False, True]
    found = [tuple(zip(*step.verified[:5], strict=True)) for step in gate.seen]
    assert found == [((1, 0, 0, 0, -1),) * 2, ((3, 2, 2, 0, 0),) * 2, ((1, K, 0, 0, 0),) * 2]
    times = [step.now_ns for step in gate.seen]
    assert times == sorted(set(times))
    assert gate.seen[2].num_tokens.sum() == gate.seen[1].num_tokens.sum() + 2


def test_the_gate_is_told_which_share_of_the_requests_may_have_each_shape():
    engine = Engine(*"abcd", gate=GateConfig("auto"), shape="auto", verifies_trees=True)
    engine.without, engine.chains_only = {"a"}, {"c", "d"}
    gate = on_record(engine)
    for names in ("abcd", "bd", "b", "cd", "a"):
        engine.step(*names)
    shares = [step.may_draft for step in gate.seen]
    assert shares == [(0.75, 0.25), (1.0, 0.5), (1.0, 1.0), (1.0, 0.0), (0.0, 0.0)]


def test_a_gate_that_measures_is_told_what_was_offered_to_the_same_batch():
    engine = Engine("a", "b", "c", gate=GateConfig("auto"))
    gate = on_record(engine)
    engine.step("a", "b")
    engine.step("a", "b", sampled=1 + K)  # all offered tokens were right
    engine.go_on({"a": [99], "b": [99]})  # all offered tokens were wrong
    engine.step("a", "c")
    gate.given = 0  # the gate asks for no drafts
    engine.step("a", "c")
    engine.step("a", "c")
    offered = [step.offered for step in gate.seen]
    assert [one and one.rows for one in offered] == [None, 2, 2, None, 2, None]
    assert offered[1].tokens[:3].sum(axis=1).tolist() == [2 * K] * 3
    assert offered[2].tokens[:3].sum(axis=1).tolist() == [2 * K, 2 * K, 0]


def test_prompts_that_are_still_computed_and_requests_without_drafts_are_offered_nothing():
    engine = Engine("a", "b", "c", gate=GateConfig("auto"))
    gate = on_record(engine)
    engine.without.add("c")
    engine.go_on({"a": next_of_period(engine.texts["a"], 1), "b": [], "c": [9]})
    engine.step("a", "b", "c")  # b's prompt is computed now
    engine.step("a", "b", "c")
    assert [step.offered and step.offered.rows for step in gate.seen] == [None, 1, 2]


def test_a_look_counts_no_open_steps_of_requests():
    engine = Engine("a")
    gate = on_record(engine)
    gate.least_chance = 2.0
    for _ in range(4):
        assert engine.step("a") == [[]]
    gate.least_chance = 0.0
    for _ in range(3):
        engine.step("a")
    assert RequestTotals(*engine.drain()["requests"]["a"]).open_steps == 2


def test_without_room_nothing_is_drafted_or_filled_up_and_all_is_read():
    engine = Engine("a", "b", "c", pad_drafts="always")
    engine.room = False
    assert engine.step("a", "b", "c") == [[], [], []]
    assert engine.session.wants_drafts, "the next step is to be filled up"
    engine = Engine("a", "b")
    engine.room = False
    assert engine.step("a", "b") == [[], []]
    assert engine.session.wants_drafts, "the gate is open"
    engine.room = True
    assert engine.step("a", "b") == [next_of_period(engine.texts["a"])] * 2
    engine.add("c")
    engine.step("a", "b", "c")
    assert not engine.session.wants_drafts, "more requests than the threshold"
    assert engine.counter("catch_up_tokens") == sum(map(len, engine.texts.values()))


def test_places_that_are_scheduled_are_drafted_before_the_gate_is_asked():
    engine = Engine("a")
    gate = on_record(engine)
    engine.step("a")
    engine.drain()
    gate.seen.clear()
    engine.whole = True
    for step in range(3):
        assert engine.step("a", sampled=1 + step) == [next_of_period(engine.texts["a"])]
        assert len(gate.seen) == step
        engine.session.settle()
        engine.session.settle()  # the second call does nothing
        assert len(gate.seen) == step + 1
    assert [one.verified.accepted.tolist() for one in gate.seen] == [[0], [1], [2]]
    steps = engine.drain()["steps"]
    assert (steps["gate_open"], steps["draft_budget"]) == ([True] * 3, [K] * 3)
    assert steps["accepted_tokens"] == [0, 1, 2]


def test_whoever_does_not_settle_loses_nothing():
    settled, left = Engine("a", "b", "c"), Engine("a", "b", "c")
    for engine in (settled, left):
        engine.whole = True
        for batch in ("a", "ab", "ba", "cb"):
            engine.step(*batch, sampled=2)
            if engine is settled:
                engine.session.settle()
    one, other = (engine.drain() for engine in (settled, left))
    assert one["requests"] == other["requests"]
    accepted = one["steps"]["accepted_tokens"]
    assert accepted == other["steps"]["accepted_tokens"] == [0, 0, 2, 1]


def test_the_gate_hears_of_whole_steps_also_where_the_next_has_no_room():
    engine = Engine("a")
    gate = on_record(engine)
    places = [(True, False), (False, True), (False, False), (True, True)]
    for engine.whole, engine.room in places:
        engine.step("a")
        engine.session.settle()
    assert gate.asked == places


def test_drafts_that_the_gate_did_not_want_are_told_it_as_wasted():
    engine = Engine("a", "b", "c")
    gate = on_record(engine)
    engine.step("a", "b")
    engine.whole, gate.given = True, 0
    for is_drafted in (True, False):  # first a draft of the open gate, then only filling
        drafts, *_ = engine.step("a", "b", "c")
        text = engine.texts["a"]
        assert drafts == (next_of_period(text) if is_drafted else text[-1:] * K)
        engine.session.settle()
        assert not engine.session.wants_drafts
    engine.whole = engine.room = False
    engine.step("a", "b", "c")
    engine.step("a", "b", "c")
    assert [step.wasted for step in gate.seen] == [False, False, True, True, False]


def test_a_gate_that_never_opens_has_whole_steps_filled():
    engine = Engine("a", gate=GateConfig("closed"), pad_drafts="always")
    engine.step("a")
    engine.whole = True
    for _ in range(3):
        (filling,) = engine.step("a")
        assert filling == [engine.texts["a"][-1]] * K
        engine.session.settle()
    drained = engine.drain()
    assert drained["steps"]["gate_open"] == [False] * 4
    totals = RequestTotals(*drained["requests"]["a"])
    assert (totals.drafted_tokens, totals.open_steps) == (0, 0)


CALLS = "bind", "observe", "draft", "finish", "end_step", "counters", "levels"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("pad_drafts", ["never", "always"])
def test_a_failure_ends_drafting_and_nothing_else(call, pad_drafts, monkeypatch, caplog):
    engine = Engine("a", "b", pad_drafts=pad_drafts)
    assert all(engine.step("a", "b"))
    engine.drain()

    def fail(*_args, **_kwargs):
        raise MemoryError("no room for automata")

    monkeypatch.setattr(SamDrafter, call, fail)
    filled = [[PERIOD[0]] * K] if pad_drafts == "always" else [[]]
    with caplog.at_level(logging.WARNING, LOGGER):
        engine.texts["c"] = [*PERIOD, 1]
        del engine.texts["b"]
        engine.step("a", "c")  # bind and finish are called when the batch changes
        drained = engine.drain()
        for _ in range(2):
            engine.texts["a"] = PERIOD[:1]
            assert engine.go_on({"a": [PERIOD[0]]}) == filled
        assert engine.step("a", "c", sampled=0) == [[], []], "prompts are not filled up"
    (warning,) = warnings_of(caplog)
    assert "switched off" in warning.message
    assert warning.exc_info is not None, "the reason belongs into the log"
    counters = drained["counters"]
    assert counters["draft/failures"] == 1
    assert "draft/bytes" not in counters, "there is no drafter to ask"
    assert "a" in drained["requests"]
    later = engine.drain()
    assert later["counters"]["draft/failures"] == 0, "it is counted once"
    assert later["requests"] == {}, "requests are reported once after a failure"
    assert not any(later["steps"].values())


@pytest.mark.parametrize("call", ["observe", "budget"])
def test_a_gate_that_fails_ends_drafting(call, monkeypatch, caplog):
    engine = Engine("a")
    gate = on_record(engine)
    assert all(engine.step("a"))
    monkeypatch.setattr(gate, call, lambda *_args, **_options: 1 / 0)
    with caplog.at_level(logging.WARNING, LOGGER):
        assert [engine.step("a") for _ in range(5)] == [[[]]] * 5
    (warning,) = warnings_of(caplog)
    assert "without drafts" in warning.message and warning.exc_info is not None
    assert [engine.counter("failures") for _ in range(2)] == [1, 0]


def test_a_gate_whose_counts_fail_loses_nothing_else(monkeypatch):
    engine = Engine("a")
    gate = on_record(engine)
    assert all(engine.step("a"))
    monkeypatch.setattr(gate, "drain", lambda: 1 / 0)
    drained = engine.drain()
    assert "a" in drained["requests"] and any(drained["steps"].values())
    assert drained["counters"]["draft/failures"] == 1
    assert engine.step("a") == [[]]
    assert engine.counter("failures") == 0


def test_an_exchange_that_fails_is_counted_named_once_and_tried_again(monkeypatch, caplog):
    engine = Engine("a", siblings=True)
    engine.step("a")
    exchange = engine.session.exchange_texts
    assert exchange("0", []) == []

    def fail(*_):
        raise MemoryError("no room for texts")

    with caplog.at_level(logging.WARNING, LOGGER):
        assert exchange("0", None) == [], "a message that is no list of pieces"
        with monkeypatch.context() as patched:
            patched.setattr(PromptTexts, "exchange", fail)
            assert exchange("0", []) == []
        assert engine.step("a") == [next_of_period(engine.texts["a"])]
    (warning,) = warnings_of(caplog)
    assert "drafting goes on" in warning.message and warning.exc_info is not None
    counters = engine.drain()["counters"]
    assert (counters["draft/exchange_failures"], counters["draft/failures"]) == (2, 0)
    engine.add_siblings(START, "b")
    engine.step("b")
    (told,) = exchange("0", [])
    assert told.response == "0/1"
    assert engine.counter("exchange_failures") == 0


def holders_of(root: object, word: str) -> list[object]:
    seen, found, todo = {id(root)}, [], [root]
    while todo:
        one = todo.pop()
        keys = list(one) if isinstance(one, dict) else []  # gc leaves out keys that are strings
        for part in [*keys, *gc.get_referents(one)]:
            if isinstance(part, str) and word in part:
                found.append(one)
            elif id(part) not in seen and not isinstance(part, type | type(gc) | str):
                if callable(part) and not hasattr(part, "__self__"):
                    continue  # functions lead to their modules, and so to everything
                seen.add(id(part))
                todo.append(part)
    return found


@pytest.mark.parametrize("record", [True, False])
def test_nothing_keeps_the_ids_of_requests_that_ended(record, tmp_path):
    engine = Engine(siblings=True, folder=str(tmp_path), record=record, pad_drafts="always")
    for number in range(3):
        names = [f"request-{number}{letter}" for letter in "abc"]
        engine.add_siblings([number, *PERIOD, *PERIOD], *names)
        engine.without.add(names[2])
        engine.step(*names)
        engine.step(*names[:2], sampled=2)  # the third request is preempted
    assert holders_of(engine.session, "request-0")
    for kept in (engine.texts, engine.identities, engine.without):
        kept.clear()
    engine.add("last")
    engine.step("last")
    engine.drain()
    engine.session.drafter.wait()
    assert holders_of(engine.session, "request-") == []


def test_without_recording_nothing_piles_up():
    engine = Engine(siblings=True, record=False)
    for number in range(20):
        engine.texts.clear()
        engine.add_siblings(PERIOD[: 1 + number % 4], f"r{number}", step=number)
        engine.step(f"r{number}")
    assert groups(engine.session.drafter) == 1, "the last group is left"
    drained = engine.drain()
    assert (drained["steps"]["noted_s"], list(drained["requests"])) == ([], ["r19"])


def life(engine: Engine, drained: list) -> None:
    rng = np.random.default_rng(5)
    for number in range(60):
        if number % 9 == 0:
            engine.add_siblings(rng.integers(0, 2, 6).tolist(), f"{number}a", f"{number}b")
        running = list(engine.texts)[-int(rng.integers(1, MAX_ROWS + 1)) :]
        engine.go_on(
            {name: rng.integers(0, 2, rng.integers(0, K + 2)).tolist() for name in running}
        )
        for name in running:
            if len(engine.texts[name]) > MAX_LENGTH - 2 * K:
                del engine.texts[name]
        if number % 7 == 0:
            drained.append(engine.drain())
            assert_nothing_more(engine)
    drained.append(engine.drain())


def assert_nothing_more(engine: Engine) -> None:
    again = engine.drain()["counters"]
    held = engine.session.drafter.levels()
    assert {name: value for name, value in again.items() if name not in held and value} == {}


@pytest.mark.parametrize("kind", ["threshold", "auto"])
def test_nothing_is_cumulative(kind):
    gate = GateConfig(kind=kind, threshold=THRESHOLD)
    engine = Engine(siblings=True, gate=gate, pad_drafts="always")
    parts: list = []
    life(engine, parts)
    sums = Counter()
    for drained in parts:
        sums.update(drained["counters"])
    for name, value in engine.session.drafter.counters().items():
        assert sums[name] == value, name
    assert sums["draft/drafter_steps"] == 60
    steps = [drained["steps"] for drained in parts]
    totals = {}
    for drained in parts:  # later totals of a request replace earlier ones
        totals |= drained["requests"]
    _, drafted, accepted, _, _ = map(sum, zip(*totals.values(), strict=True))
    assert drafted == sum(sum(one["draft_tokens"]) for one in steps)
    assert accepted == sum(sum(one["accepted_tokens"]) for one in steps)
    assert sums["draft/padding_tokens"] > sums["draft/accepted_padding_tokens"] > 0
    if kind == "threshold":
        assert sums["draft/proposed_tokens"] > drafted > accepted > 0


def test_steps_tell_budget_and_sources():
    engine = Engine("a", "b", "c")
    engine.step("a", "b")
    engine.step("a", "b", "c", sampled=3)
    steps = engine.drain()["steps"]
    assert set(steps) == {"noted_s", *NOTE_COLUMNS}
    assert (steps["draft_requests"], steps["draft_tokens"]) == ([0, 2], [0, 4])
    assert steps["accepted_per_position"] == [[], [2, 2, 0]], "empty where nothing was verified"
    assert steps["noted_s"] == sorted(steps["noted_s"])
    assert steps["draft_budget"] == [K, 0] and steps["gate_open"] == [True, False]
    assert steps["draft_trees"] == [False, False]
    assert all(0 < one < 1e9 for one in steps["drafter_us"])
    assert steps["drafted_per_source"] == [[], by_source(own=4)]
    assert steps["accepted_per_source"] == [[], by_source(own=4)]
    engine.step("a", "b")
    engine.step("a", "b", sampled=2)
    assert engine.drain()["steps"]["accepted_per_source"] == [[], by_source(own=2)]
    assert not any(engine.drain()["steps"].values())


def test_requests_without_drafts_get_none_wherever_they_are_in_the_batch():
    engine = Engine("without", "a")
    engine.without.add("without")
    assert engine.step("without", "a") == [[], next_of_period(engine.texts["a"])]
    assert engine.step("a", "without") == [next_of_period(engine.texts["a"]), []]
    assert engine.step("without") == [[]], "its text is read all the same"
    assert engine.drain()["requests"]["without"] == (0, 0, 0, 2, 2), "the gate was open for it, too"
    del engine.texts["without"]
    assert engine.step("a") == [next_of_period(engine.texts["a"])]


@pytest.mark.parametrize("pad_drafts", ["never", "always"])
def test_a_session_that_is_paused_drafts_nothing_and_keeps_nothing(pad_drafts, tmp_path):
    engine = Engine("a", folder=str(tmp_path), pad_drafts=pad_drafts)
    gate = on_record(engine)
    engine.step("a")
    engine.texts.clear()
    engine.drain()
    before, (seen, files) = engine.drain(), (len(gate.seen), list(tmp_path.rglob("*")))
    engine.session.pause(True)
    engine.add("again")
    for _ in range(3):
        assert engine.step("again") == [[]] and not engine.session.wants_drafts
    engine.texts.clear()
    engine.session.pause(False)
    assert (len(gate.seen), list(tmp_path.rglob("*"))) == (seen, files)
    assert engine.drain() | {"clock_s": 0} == before | {"clock_s": 0}
    engine.add("b")
    assert engine.step("b") == [next_of_period(engine.texts["b"])]


class Drafts:
    def __init__(self, *, works: bool = True, after: int = 1) -> None:
        self.works, self.engine = works, None
        self.asked = [False] * (after - 1)

    def __call__(self):
        self.asked.append(self.engine is not None and self.engine.session.wants_made)
        if not (self.asked.pop(0) and self.works):
            return None
        return np.full((len(self.engine.texts), 2), 40, np.int32), None


def looks(drafts: Drafts) -> list[bool]:
    sources = SourcesConfig.from_mapping(
        {name: {"enabled": name == "own"} for name in NAMES}
        | {"model": {"enabled": True, "method": "ngram", "max_tokens": 2}}
    )
    after = 1 + len(drafts.asked)
    engine = Engine("a", sources=sources, gate=GateConfig("auto"), made=drafts, made_after=after)
    gate = on_record(engine)
    drafts.engine, gate.least_chance = engine, LOOK
    for _ in range(5):
        engine.step("a")
    return [step.offered is not None for step in gate.seen]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ({}, 2),  # a look needs the model's drafts, so the model drafts first
        ({"after": 3}, 4),  # with steps scheduled ahead, drafts come later
        ({"after": 3, "works": False}, 4),
        ({"works": False}, 2),  # the gate still looks if the model cannot draft
    ],
)
def test_a_closed_gate_looks_when_the_models_drafts_are_there(options, first):
    assert looks(Drafts(**options)) == [step >= first for step in range(5)]


@pytest.mark.parametrize("pays", [False, True])
def test_a_look_waits_for_a_model_only_where_its_passes_pay(pays):
    price = SimpleNamespace(pays=pays, observe=lambda step, is_open: None)
    made = MadeDrafts(ModelSourceConfig(enabled=True, method="ngram"), EngineHooks(), price)
    assert made.take() is None
    waits = made.ask(decode(1), was_open=False, is_open=False, looks=True)
    assert (waits, made.wanted) == (pays, pays)


def test_a_group_lives_on_while_one_of_its_responses_is_interrupted():
    engine = Engine(siblings=True)
    engine.add_siblings([9, *PERIOD], "a", "b")
    engine.step("a", "b")
    interrupted = engine.identities["b"]
    engine.texts.clear()  # both requests have ended
    engine.session.drain([interrupted])
    assert groups(engine.session.drafter) == 1
    engine.drain()
    assert groups(engine.session.drafter) == 0, "it did not come back"
