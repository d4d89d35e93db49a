"""Responses to one prompt draft from each other: who belongs together, and for how long."""

from concurrent.futures import Future
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam_rollout.automaton.interface import AutomatonFullError
from sam_rollout.automaton.pool import AutomatonPool
from sam_rollout.config import SamConfig, SourcesConfig
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.sources.own import OwnSourceConfig
from sam_rollout.sources.siblings import SiblingsSourceConfig
from sam_rollout.sources.support import kept_texts, moving
from tests.unit.drafting.texts import identity, step


def make_drafter(*names, k=3, max_rows=8, own=True, max_bytes=1 << 30, scope="prompt"):
    """A drafter that has met requests of these names, siblings."""
    sources = SourcesConfig(
        own=OwnSourceConfig(enabled=own),
        siblings=SiblingsSourceConfig(enabled=True, max_bytes=max_bytes, scope=scope),
    )
    drafter = SamDrafter(SamConfig(max_draft_tokens=k, sources=sources), max_rows, 1 << 20)
    admitted(drafter, "g", *names)
    return drafter


def admitted(drafter, group, *names, **who):
    for sibling, name in enumerate(names):
        drafter.admit(name, identity(group, sibling, **who))


def counter(drafter, name):
    return (drafter.counters() | drafter.levels())[f"draft/{name}"]


def test_a_response_drafts_what_its_sibling_wrote():
    drafter = make_drafter("a", "b")
    texts = {"a": [9, 1, 2, 3, 4, 5], "b": [9, 6, 2, 3]}
    assert step(drafter, texts) == {"a": [], "b": [4, 5]}


def test_finished_responses_stay_until_the_step_ends():
    drafter = make_drafter("a", "b")
    step(drafter, {"a": [9, 1, 2, 3, 4, 5]})
    drafter.finish(["a"])
    assert step(drafter, {"b": [9, 6, 2, 3]}) == {"b": [4, 5]}
    drafter.end_step()
    assert counter(drafter, "siblings_groups") == 1, "b is still running"
    drafter.finish(["b"])
    assert counter(drafter, "siblings_groups") == 0
    assert drafter.usage().bytes == 0


def test_groups_without_live_requests_end_with_the_step():
    drafter = make_drafter("a")
    step(drafter, {"a": [9, 1, 2, 3]})
    drafter.finish(["a"])
    assert counter(drafter, "siblings_groups") == 1
    assert counter(drafter, "siblings_bytes") > 0
    drafter.end_step()
    assert counter(drafter, "siblings_groups") == counter(drafter, "siblings_bytes") == 0


@pytest.mark.parametrize(
    ("scope", "other", "shares"),
    [
        ("prompt", identity("h"), False),
        ("prompt", identity("g", step=2), False),
        ("prompt", identity("g", split="val"), False),
        ("prompt", None, False),
        ("auto", identity("h"), False),  # without a run nobody decides: as prompt
        ("run", identity("h"), True),
        ("run", identity("h", step=2), True),
        ("run", identity("g", split="val"), False),
        ("run", None, True),
    ],
)
def test_who_shares_with_a_request_of_a_prompt(scope, other, shares):
    drafter = make_drafter("a", scope=scope)
    step(drafter, {"a": [9, 1, 2, 3, 4, 5]})
    if scope == "run":  # it lasts longer than the step
        drafter.finish(["a"])
        drafter.end_step()
    if other:
        drafter.admit("b", other)
    assert step(drafter, {"b": [8, 6, 2, 3]})["b"] == ([4, 5] if shares else [])


def grown(drafter, name, text, others=()):
    """A request generates a text after one token of prompt, beside the others as they stand."""
    drafts = {}
    for length in (1, 2, len(text)):
        texts = {**dict(others), name: text[:length]}
        drafts = step(drafter, texts, width=max(map(len, [text, *texts.values()])) + 8)
    return drafts


def ended(drafter, name, text, **who):
    """A request comes, generates a text and ends; then the training step is over."""
    drafter.admit(name, identity(name, **who))
    grown(drafter, name, text)
    drafter.finish([name])
    drafter.end_step()
    drafter.wait()


def continued(drafter, name, start, **who):
    """What a new request with this text gets for a draft."""
    drafter.admit(name, identity(name, **who))
    draft = step(drafter, {name: start})[name]
    drafter.finish([name])
    return draft


def random_texts(count, length, seed=0):
    rng = np.random.default_rng(seed)
    return rng.permutation(count * length).reshape(count, length).tolist()


def run_drafter(**options):
    return make_drafter(own=False, scope="run", max_bytes=1 << 20, **options)


def test_old_text_of_a_run_goes_by_generations():
    drafter, texts = run_drafter(), random_texts(60, 1000)
    for number, text in enumerate(texts):
        ended(drafter, f"r{number}", text)
        assert drafter.usage().bytes <= 1 << 20
        assert counter(drafter, "siblings_evictions") == 0
        if number >= 5:  # the newest are always there, a change or not
            for old in (0, 3, 5):
                start = texts[number - old][500:504]
                expected = texts[number - old][504:507]
                assert continued(drafter, f"n{number}{old}", [7, *start]) == expected
    assert counter(drafter, "siblings_restarts") > 5
    assert counter(drafter, "siblings_evictions") == counter(drafter, "siblings_failures") == 0
    assert counter(drafter, "siblings_groups") == 1
    assert counter(drafter, "siblings_seeded_tokens") > 20_000
    assert continued(drafter, "x", [7, *texts[0][500:504]]) == [], "the oldest are gone"


def test_no_engine_step_waits_for_a_successor(monkeypatch):
    """While one is made, requests join the old automaton; when it is there, later ones join it."""
    drafter, texts = run_drafter(), random_texts(20, 1000)
    source = drafter.sources[0]
    submitted = []
    monkeypatch.setattr(
        source._kept._executor,
        "submit",
        lambda *task: submitted.append((Future(), *task)) or submitted[-1][0],
    )
    monkeypatch.setattr(source._kept, "wait", lambda: None)
    for number, text in enumerate(texts[:15]):
        ended(drafter, f"r{number}", text)
    assert len(submitted) == 1 and counter(drafter, "siblings_restarts") == 0
    assert continued(drafter, "a", [7, *texts[1][20:24]]) == texts[1][24:27]
    for _ in range(2):  # what has ended meanwhile is added
        future, task, *arguments = submitted.pop()
        future.set_result(task(*arguments))
        drafter.end_step()
    assert counter(drafter, "siblings_restarts") == 1
    for number in (9, 14):
        start = texts[number][20:24]
        assert continued(drafter, f"b{number}", [7, *start]) == texts[number][24:27]


def test_live_requests_move_a_few_tokens_at_a_time_and_never_lose_their_drafts(monkeypatch):
    monkeypatch.setattr(moving, "TOKENS_PER_STEP", 100)
    drafter, (live, *others) = run_drafter(), random_texts(12, 1000)
    drafter.admit("live", identity("live"))
    grown(drafter, "live", live)
    for number, text in enumerate(others):
        drafter.admit(f"r{number}", identity(f"r{number}"))
        grown(drafter, f"r{number}", text, {"live": live})
        drafter.finish([f"r{number}"])
        drafter.wait()
        if counter(drafter, "siblings_restarts"):
            break
    assert counter(drafter, "siblings_groups") == 2
    text, steps = [*live, *live[20:24]], 0
    while counter(drafter, "siblings_groups") == 2:
        before = drafter.usage().catch_up_tokens
        assert step(drafter, {"live": text})["live"] == live[24:27]
        assert drafter.usage().catch_up_tokens - before <= 200, "of live texts and of ended ones"
        steps += 1
    assert 9 <= steps <= 12, "1004 tokens"
    assert step(drafter, {"live": text})["live"] == live[24:27], "from the successor"
    for _ in range(12):
        step(drafter, {"live": text})
    assert continued(drafter, "a", [7, *text[50:54]]) == text[54:57], "others find it there"
    assert continued(drafter, "b", [7, *others[number][50:54]]) == others[number][54:57]
    drafter.finish(["live"])
    assert drafter.usage().live_requests == 0


def test_a_request_that_ends_or_pauses_on_its_way_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(moving, "TOKENS_PER_STEP", 100)
    drafter, texts = run_drafter(), random_texts(15, 1000)
    names = {"stays": texts[12], "ends": texts[13], "pauses": texts[14]}
    for name in names:
        drafter.admit(name, identity(name))
    step(drafter, names)
    for number, text in enumerate(texts[:11]):
        drafter.admit(f"r{number}", identity(f"r{number}"))
        grown(drafter, f"r{number}", text, names)
        drafter.finish([f"r{number}"])
    drafter.end_step()
    drafter.wait()
    assert counter(drafter, "siblings_restarts") == 1
    step(drafter, names)
    assert drafter.usage().live_requests == 3
    drafter.finish(["ends"])
    assert drafter.usage().live_requests == 2
    for _ in range(12):
        step(drafter, {"stays": names["stays"]})
    assert counter(drafter, "siblings_groups") == 2, "one that pauses has not moved"
    for _ in range(12):
        step(drafter, {"pauses": names["pauses"], "stays": names["stays"]})
    assert counter(drafter, "siblings_groups") == 1
    drafter.finish(["stays", "pauses"])
    assert drafter.usage().live_requests == 0 and len(drafter.sources[0].pool) == 0


def test_a_run_that_outgrows_its_memory_with_live_text_begins_anew():
    drafter = run_drafter()
    text = np.random.default_rng(0).integers(0, 1000, 40_000).tolist()
    for life in range(1, 4):
        names = [f"{life}a", f"{life}b"]
        admitted(drafter, "g", *names)
        step(drafter, {names[0]: text, names[1]: text[:5]}, width=len(text))
        assert counter(drafter, "siblings_evictions") == life
        assert counter(drafter, "siblings_bytes") < 1000
        read = drafter.usage().catch_up_tokens
        for _ in range(2):  # the live ones do without, and are not read again
            drafts = step(drafter, {names[0]: text, f"{life}c": [1, 2, 3]}, width=len(text))
            assert drafts[names[0]] == []
        assert drafter.usage().catch_up_tokens == read + 3
        assert step(drafter, {names[1]: text[:6], f"{life}d": [4, 2]})[f"{life}d"] == [3]
        drafter.finish([f"{life}{name}" for name in "abcd"])
    assert counter(drafter, "siblings_restarts") == 0


def resumed(folder, **options):
    sources = SourcesConfig(
        own=OwnSourceConfig(enabled=False),
        siblings=SiblingsSourceConfig(enabled=True, scope="run", path=str(folder), **options),
    )
    return SamDrafter(SamConfig(max_draft_tokens=3, sources=sources), 8, 1 << 20)


def test_a_run_that_is_resumed_begins_with_the_texts_of_the_one_before(tmp_path):
    texts = random_texts(4, 200)
    first = resumed(tmp_path / "texts")
    for number, text in enumerate(texts):
        ended(first, f"r{number}", text, step=number + 1)
    again = resumed(tmp_path / "texts")
    again.admit("a", identity("a", step=4))
    step(again, {"a": [7, 7]})
    again.wait()
    assert counter(again, "siblings_seeded_tokens") >= 600
    draft = {n: step(again, {"a": [7, 7, *texts[n][50:54]]})["a"] for n in range(4)}
    assert [draft[n] for n in range(3)] == [texts[n][54:57] for n in range(3)], "it has moved"
    assert draft[3] == [], "of the step that is sampled again"
    assert continued(again, "b", [7, *texts[2][60:64]], step=4) == texts[2][64:67]
    assert counter(again, "siblings_failures") == 0


def test_texts_that_cannot_be_read_or_written_cost_a_warning(tmp_path, caplog):
    (tmp_path / "texts").write_text("no folder")
    drafter, (text, other) = resumed(tmp_path / "texts"), random_texts(2, 200)
    ended(drafter, "a", text)
    ended(drafter, "b", other)
    assert continued(drafter, "c", [7, *text[50:54]]) == text[54:57]
    assert counter(drafter, "siblings_failures") >= 1
    assert len([one for one in caplog.records if one.levelname == "WARNING"]) == 1


def test_a_successor_that_cannot_be_made_is_not_missed(monkeypatch, caplog):
    monkeypatch.setattr(kept_texts, "_make", lambda *_: 1 / 0)
    drafter, texts = run_drafter(), random_texts(40, 1000)
    for number, text in enumerate(texts):
        ended(drafter, f"r{number}", text)
        assert continued(drafter, f"n{number}", [7, *text[50:54]]) in (text[54:57], [])
    assert 1 <= counter(drafter, "siblings_failures") < 40
    assert counter(drafter, "siblings_evictions") >= 1, "as without successors"
    assert "cannot be taken over" in caplog.text


@pytest.mark.parametrize("scope", ["prompt", "run"])
def test_an_automaton_that_one_step_fills_is_given_up_and_the_others_are_read(scope, monkeypatch):
    drafter = make_drafter("a", own=False, scope=scope)
    drafter.admit("b", identity("g", split="val"))
    texts = {"a": [9, 1, 2, 3, 1, 2], "b": [9, 1, 2, 3, 1, 2]}
    step(drafter, texts)
    extend = AutomatonPool.extend

    def full(pool, slots, *arguments):
        if slots[0] >= 0:
            raise AutomatonFullError("full", pool._automaton_of(int(slots[0])))
        extend(pool, slots, *arguments)

    monkeypatch.setattr(AutomatonPool, "extend", full)
    assert step(drafter, texts) == {"a": [], "b": [3, 1, 2]}
    assert counter(drafter, "siblings_evictions") == 1
    monkeypatch.undo()
    assert step(drafter, texts) == {"a": [], "b": [3, 1, 2]}


def test_a_closed_gate_reads_all_the_same():
    drafter = make_drafter("a", "b")
    texts = {"a": [9, 1, 2, 3, 4, 5], "b": [9, 6, 2, 3]}
    assert step(drafter, texts, gate_open=False) == {"a": [], "b": []}
    assert step(drafter, texts)["b"] == [4, 5]


def test_an_id_used_again_is_another_sibling():
    drafter = make_drafter("a", "b")
    step(drafter, {"a": [9, 1, 2, 3, 4, 5], "b": [9]})
    drafter.finish(["a"])
    drafter.admit("a", identity("g", 2))
    assert step(drafter, {"b": [9, 6], "a": [9, 7, 2, 3]})["a"] == [4, 5]
    assert drafter.usage().rebuilds == 0


def test_an_id_used_again_without_notice_keeps_its_group():
    drafter = make_drafter("a", "b")
    step(drafter, {"a": [9, 1, 2, 3, 4, 5], "b": [9]})
    assert step(drafter, {"a": [8, 2, 3], "b": [9]})["a"] == [4, 5]


def test_max_bytes_gives_up_the_group_absent_longest_and_leaves_it_given_up():
    drafter = make_drafter(max_bytes=1 << 20)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 1000, 9000).tolist() for _ in range(3)]
    for number, text in enumerate(texts):
        drafter.admit(str(number), identity(f"g{number}"))
        step(drafter, {str(number): text}, width=9001)
    assert counter(drafter, "siblings_evictions") == 1
    assert counter(drafter, "siblings_bytes") <= 1 << 20
    drafter.admit("late", identity("g0", 1))
    step(drafter, {"0": texts[0], "late": texts[0][:10]}, width=9001)
    assert counter(drafter, "siblings_groups") == 2
    drafter.finish(["0", "late"])
    drafter.end_step()
    assert counter(drafter, "siblings_groups") == 2, "1 and 2 are alive"
    drafter.admit("new", identity("g0", 1))
    step(drafter, {"new": [1, 2]}, width=9001)
    assert counter(drafter, "siblings_groups") == 3


def test_requests_of_a_group_that_was_given_up_are_never_read_again():
    drafter = make_drafter("a", "late", own=False, max_bytes=1 << 20)
    text = np.random.default_rng(0).integers(0, 1000, 40_000).tolist()
    step(drafter, {"a": text}, width=len(text))
    step(drafter, {"a": text, "late": [1]}, width=len(text))
    read = drafter.usage().catch_up_tokens
    drafter.end_step()
    admitted(drafter, "g", "next")
    texts = {"next": [1, 2, 3], "a": text, "late": [1, 2]}
    assert step(drafter, texts, width=len(text)) == {"next": [], "a": [], "late": []}
    assert drafter.usage().catch_up_tokens == read + 3
    drafter.finish(list(texts))
    assert counter(drafter, "siblings_groups") == 1, "its step is not over"


def test_a_present_group_that_is_too_large_is_given_up_and_own_text_goes_on():
    drafter = make_drafter("a", "b", max_bytes=1 << 20)
    rng = np.random.default_rng(0)
    texts = {name: rng.integers(0, 1000, 20_000).tolist() for name in "ab"}
    step(drafter, texts, width=20_001)
    assert counter(drafter, "siblings_bytes") == 0
    assert counter(drafter, "siblings_evictions") == 1
    assert all(step(drafter, texts, width=20_001).values())
    drafter.finish(["a", "b"])
    assert drafter.usage().live_requests == 0


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "leave", "return", "finish", "new", "end_step"]),
        st.integers(0, 3),
        st.lists(st.integers(0, 2), max_size=4),
    ),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(EVENTS, st.lists(st.integers(0, 2), max_size=4))
def test_any_schedule_drafts_what_followed_in_the_group(events, prompt):
    """Requests of one group that grow, pause, return, end: drafts go on as one of them did."""
    drafter = make_drafter(k=2, own=False)
    known, present, ended, born = {}, [], [], 0
    for event, number, tokens in events:
        if event == "new" and len(known) < 5:
            name, born = f"r{born}", born + 1
            drafter.admit(name, identity("g", born))
            known[name] = list(prompt)
            present.append(name)
        elif event == "end_step" and not known:
            drafter.end_step()
            ended.clear()
        elif known:
            name = list(known)[number % len(known)]
            if event == "grow" and name in present:
                known[name] += tokens
            elif event == "leave" and name in present:
                present.remove(name)
            elif event == "return" and name not in present:
                present.append(name)
            elif event == "finish":
                # The engine hands over no text that was sampled last.
                drafter.finish([name])
                ended.append(known.pop(name))
                if name in present:
                    present.remove(name)
        drafts = step(drafter, {name: known[name] for name in present}, width=200)
        written = {pair for text in (*known.values(), *ended) for pair in pairwise(text)}
        for name, draft in drafts.items():
            last = known[name][-1:]
            assert bool(draft) == any([before] == last for before, _ in written)
            assert {*pairwise([*last, *draft])} <= written
    assert drafter.usage().rebuilds == 0
