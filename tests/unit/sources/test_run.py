import numpy as np
import pytest

from sam_rollout.automaton.interface import AutomatonFullError
from sam_rollout.automaton.pool import AutomatonPool
from sam_rollout.core.identity import OUTSIDE_TRAINING
from sam_rollout.sources import run
from sam_rollout.sources.support import text_moves
from sam_rollout.sources.support.text_store import Text, TextStore
from tests.unit.drafting.texts import Later, counter, drafter_of, enter, identity, leave, step

MIB = 1 << 20


def make_drafter(*others, path="", **options):
    return drafter_of(*others, path=path, run={"when": "always", **options})


def automata(drafter):
    return len(list(drafter.sources[0]._all()))


@pytest.mark.parametrize(
    ("other", "shares"),
    [
        (identity("h"), True),
        (identity("h", step=2), True),
        (identity("g", split="val"), False),
        (None, True),
    ],
)
def test_all_requests_of_a_split_share_and_longer_than_a_step(other, shares):
    drafter = make_drafter()
    enter(drafter, "a", identity("g"), [9, 1, 2, 3, 4, 5])
    leave(drafter, ["a"])
    assert enter(drafter, "b", other, [8, 6, 2, 3]) == ([4, 5] if shares else [])


def test_it_stands_beside_the_prompts_source():
    drafter = make_drafter("prompt")
    assert [source.name for source in drafter.sources] == ["prompt", "run"]
    ended(drafter, "h", [9, 1, 2, 3, 4, 5])
    assert continued(drafter, "a", [8, 6, 2, 3], step=2) == [4, 5]
    draft = enter(drafter, "b", identity("a", 1, step=2), [8, 6])
    assert draft == [2, 3, 4], "the sibling's, then the run's"
    assert counter(drafter, "prompt_bytes") > 0 and counter(drafter, "run_bytes") > 0


def test_without_a_run_nobody_knows_what_fits():
    drafter = drafter_of("own", "run")
    assert [source.name for source in drafter.sources] == ["own"]


def grown(drafter, name, text, others=()):
    for length in (1, 2, len(text)):
        step(drafter, {**dict(others), name: text[:length]})


def ended(drafter, name, text, **who):
    drafter.admit(name, identity(name, **who))
    grown(drafter, name, text)
    leave(drafter, [name])
    drafter.wait()


def continued(drafter, name, start, **who):
    draft = enter(drafter, name, identity(name, **who), start)
    drafter.finish([name])
    return draft


def random_texts(count, length):
    rng = np.random.default_rng(0)
    return rng.permutation(count * length).reshape(count, length).tolist()


def test_old_text_of_a_run_goes_by_generations():
    drafter, texts = make_drafter(max_bytes=MIB), random_texts(60, 1000)
    for number, text in enumerate(texts):
        ended(drafter, f"r{number}", text)
        assert drafter.usage().bytes <= 1 << 20
        assert counter(drafter, "run_evictions") == 0
        if number >= 5:  # the newest texts give drafts, even right after an automaton was replaced
            for old in (0, 3, 5):
                start = texts[number - old][500:504]
                expected = texts[number - old][504:507]
                assert continued(drafter, f"n{number}{old}", [7, *start]) == expected
    assert counter(drafter, "run_restarts") > 5
    assert counter(drafter, "run_evictions") == counter(drafter, "run_failures") == 0
    assert automata(drafter) == 1
    assert counter(drafter, "run_seeded_tokens") > 20_000
    assert continued(drafter, "x", [7, *texts[0][500:504]]) == [], "the oldest are gone"


def test_live_requests_move_a_few_tokens_at_a_time_and_never_lose_their_drafts(monkeypatch):
    monkeypatch.setattr(text_moves, "TOKENS_PER_STEP", 100)
    drafter, (live, *others) = make_drafter(max_bytes=MIB), random_texts(12, 1000)
    drafter.admit("live", identity("live"))
    grown(drafter, "live", live)
    for number, text in enumerate(others):
        drafter.admit(f"r{number}", identity(f"r{number}"))
        grown(drafter, f"r{number}", text, {"live": live})
        drafter.finish([f"r{number}"])
        drafter.wait()
        if counter(drafter, "run_restarts"):
            break
    assert automata(drafter) == 2
    text, steps = [*live, *live[20:24]], 0
    while automata(drafter) == 2:
        before = drafter.usage().catch_up_tokens
        assert step(drafter, {"live": text})["live"] == live[24:27]
        assert drafter.usage().catch_up_tokens - before <= 204, "of live, ended and new texts"
        steps += 1
    assert 9 <= steps <= 12, "1004 tokens"
    assert step(drafter, {"live": text})["live"] == live[24:27], "drafted from the successor"
    for _ in range(12):
        step(drafter, {"live": text})
    assert continued(drafter, "a", [7, *text[50:54]]) == text[54:57], "others find it there"
    assert continued(drafter, "b", [7, *others[number][50:54]]) == others[number][54:57]
    drafter.finish(["live"])
    assert drafter.usage().live_requests == 0


def test_a_request_that_ends_or_pauses_on_its_way_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(text_moves, "TOKENS_PER_STEP", 100)
    drafter, texts = make_drafter(max_bytes=MIB), random_texts(15, 1000)
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
    assert counter(drafter, "run_restarts") == 1
    step(drafter, names)
    assert drafter.usage().live_requests == 3
    drafter.finish(["ends"])
    assert drafter.usage().live_requests == 2
    for _ in range(12):
        step(drafter, {"stays": names["stays"]})
    assert automata(drafter) == 2, "the paused request has not moved"
    for _ in range(12):
        step(drafter, {"pauses": names["pauses"], "stays": names["stays"]})
    assert automata(drafter) == 1
    drafter.finish(["stays", "pauses"])
    assert drafter.usage().live_requests == 0 and len(drafter.sources[0].pool) == 0


def test_a_run_that_outgrows_its_memory_with_live_text_begins_anew():
    drafter = make_drafter(max_bytes=MIB)
    text = np.random.default_rng(0).integers(0, 1000, 40_000).tolist()
    for life in range(1, 4):
        names = [f"{life}a", f"{life}b"]
        for sibling, name in enumerate(names):
            drafter.admit(name, identity("g", sibling))
        step(drafter, {names[0]: text, names[1]: text[:5]})
        assert counter(drafter, "run_evictions") == life
        assert counter(drafter, "run_bytes") < 1000
        read = drafter.usage().catch_up_tokens
        for _ in range(2):  # live requests do without drafts, and are not read again
            drafts = step(drafter, {names[0]: text, f"{life}c": [1, 2, 3]})
            assert drafts[names[0]] == []
        assert drafter.usage().catch_up_tokens == read + 3
        assert step(drafter, {names[1]: text[:6], f"{life}d": [4, 2]})[f"{life}d"] == [3]
        drafter.finish([f"{life}{name}" for name in "abcd"])
    assert counter(drafter, "run_restarts") == 0


@pytest.mark.parametrize("length", [20, 100, 1500])
def test_a_successor_of_short_texts_is_no_larger_than_it_may_be(length):
    drafter, limit = make_drafter(max_bytes=MIB), 1 << 20
    source, restarts, sizes = drafter.sources[0], 0, []
    for number, text in enumerate(random_texts(40_000 // min(length, 200), length)):
        ended(drafter, f"r{number}", text)
        assert drafter.usage().bytes <= limit
        if (found := counter(drafter, "run_restarts")) > restarts:
            restarts = found
            (group,) = source._groups.values()
            sizes.append(source.pool.nbytes_of_automaton(group.automaton) / limit)
    assert source.evictions == 0 and len(sizes) > 2
    assert all(0.15 < size < 0.5 for size in sizes), "both automata fit together"


def test_a_run_that_is_resumed_begins_with_the_texts_of_the_one_before(tmp_path):
    texts = random_texts(4, 200)
    first = make_drafter(path=str(tmp_path / "texts"))
    for number, text in enumerate(texts):
        ended(first, f"r{number}", text, step=number + 1)
    again = make_drafter(path=str(tmp_path / "texts"))
    enter(again, "a", identity("a", step=4), [7, 7])
    again.wait()
    assert counter(again, "run_seeded_tokens") >= 600
    draft = {n: step(again, {"a": [7, 7, *texts[n][50:54]]})["a"] for n in range(4)}
    assert [draft[n] for n in range(3)] == [texts[n][54:57] for n in range(3)], "a has moved"
    assert draft[3] == [], "its step is sampled again"
    assert continued(again, "b", [7, *texts[2][60:64]], step=4) == texts[2][64:67]
    assert counter(again, "run_failures") == 0


def test_short_texts_of_a_run_before_are_taken_over_as_far_as_an_automaton_has_places(tmp_path):
    writer = TextStore(tmp_path, 1 << 26, 16, 1 << 20)
    short = (np.arange(number, number + 9, dtype=np.int32) for number in range(17_000))
    writer.write([Text(str(number), 1, text) for number, text in enumerate(short)])
    drafter = make_drafter(path=str(tmp_path))
    enter(drafter, "a", identity("a", step=2), [7])
    drafter.wait()
    step(drafter, {"a": [7]})
    assert counter(drafter, "run_evictions") == counter(drafter, "run_failures") == 0
    assert 50_000 < counter(drafter, "run_seeded_tokens") <= 9 * 6144
    assert continued(drafter, "b", [16_999, 17_000], step=2) == [17_001, 17_002, 17_003]


def test_a_request_outside_training_does_not_keep_a_resumed_run_from_its_texts(tmp_path):
    (text,) = random_texts(1, 200)
    ended(make_drafter(path=str(tmp_path / "texts")), "r", text, step=1)
    again = make_drafter(path=str(tmp_path / "texts"))
    ended(again, "warm-up", random_texts(1, 20)[0], step=OUTSIDE_TRAINING)
    again.wait()
    enter(again, "a", identity("a", step=2), [7, 7])
    again.wait()
    assert step(again, {"a": [7, 7, *text[50:54]]})["a"] == text[54:57]
    assert counter(again, "run_seeded_tokens") >= 200


def test_a_successor_that_cannot_be_made_is_not_missed(monkeypatch, caplog):
    monkeypatch.setattr(run, "read_texts", lambda *_: 1 / 0)
    drafter, texts = make_drafter(max_bytes=MIB), random_texts(40, 1000)
    for number, text in enumerate(texts):
        ended(drafter, f"r{number}", text)
        assert continued(drafter, f"n{number}", [7, *text[50:54]]) in (text[54:57], [])
    assert 1 <= counter(drafter, "run_failures") < 40
    assert counter(drafter, "run_evictions") >= 1, "as without successors"
    assert "cannot be taken over" in caplog.text


@pytest.mark.parametrize(("count", "length"), [(90, 20), (10, 1000)])
def test_what_ends_while_a_successor_is_made_is_read_as_far_as_it_fits(count, length, tmp_path):
    (tmp_path / "corpus.jsonl").write_text("\n".join(["[1, 2, 3]"] * 10))
    drafter = make_drafter(max_bytes=MIB, corpus=str(tmp_path / "corpus.jsonl"))
    (source,), texts = drafter.sources, random_texts(count, length)
    later = source._executor = Later()
    source.wait = lambda: None
    for number, text in enumerate(texts):
        ended(drafter, f"r{number}", text)
    assert len(later.tasks) == 1 and counter(drafter, "run_restarts") == 0
    assert continued(drafter, "old", [7, *texts[1][9:13]]) == texts[1][13:16], "no step waits"
    later.work()
    for _ in range(20):
        step(drafter, {"live": [7]})
    assert counter(drafter, "run_restarts") == 1 and counter(drafter, "run_evictions") == 0
    assert continued(drafter, "a", [7, *texts[-1][9:13]]) == texts[-1][13:16]
    assert continued(drafter, "b", [7, *texts[0][9:13]]) == [], "only the newest texts fit"


@pytest.mark.parametrize(("name", "section"), [("prompt", {}), ("run", {"when": "always"})])
def test_a_full_automaton_is_given_up_and_the_others_are_read(name, section, monkeypatch):
    drafter = drafter_of(**{name: section})
    drafter.admit("a", identity("g"))
    drafter.admit("b", identity("g", split="val"))
    texts = {"a": [9, 1, 2, 3, 1, 2], "b": [9, 1, 2, 3, 1, 2]}
    step(drafter, texts)
    extend = AutomatonPool.extend

    def full(pool, slots, *arguments):
        if slots[0] >= 0:
            raise AutomatonFullError(0)
        extend(pool, slots, *arguments)

    monkeypatch.setattr(AutomatonPool, "extend", full)
    assert step(drafter, texts) == {"a": [], "b": [3, 1, 2]}
    assert counter(drafter, f"{name}_evictions") == 1
    monkeypatch.undo()
    assert step(drafter, texts) == {"a": [], "b": [3, 1, 2]}
