import numpy as np
import pytest

from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.sources.support.shared_texts import TOKENS_PER_STEP
from tests.unit.drafting.texts import WIDTH, counter, drafter_of, enter, identity, leave, step

VOCABULARY = 1000


def make_engine(name: str, *, share=True, path="", **options) -> SamDrafter:
    options = {"share": share, **options}
    drafter = drafter_of(longest=WIDTH, vocabulary=VOCABULARY, path=path, prompt=options)
    drafter.exchange(name, [])
    drafter.admit(name, identity(sibling=ord(name[0])))
    return drafter


def pass_on(sender: SamDrafter, receiver: SamDrafter) -> list:
    pieces = sender.exchange("x", [])
    receiver.exchange("y", pieces)
    return pieces


def piece(tokens, *, start=0, response="x/1", group="g"):
    told = np.array(tokens, "<i4").tobytes()
    return ("train", 1, group, response, start, False, told)


def test_a_response_drafts_what_a_sibling_on_another_engine_is_writing():
    a, b = make_engine("a"), make_engine("b")
    step(a, {"a": [9]})
    step(a, {"a": [9, 1, 2, 3, 4]})
    step(b, {"b": [9, 6, 2, 3]})
    assert len(pass_on(a, b)) == 1
    assert step(b, {"b": [9, 6, 2, 3]})["b"] == [4]
    step(a, {"a": [9, 1, 2, 3, 4, 5, 6]})
    told = pass_on(a, b)
    assert told == [piece([5, 6], start=5, response="x/1")], "only the new tokens"
    assert step(b, {"b": [9, 6, 2, 3]})["b"][:3] == [4, 5, 6]
    assert counter(b, "shared_tokens") == 7
    assert counter(b, "live_requests") == 1, "a text of another engine is no request"


def test_what_a_response_ended_with_is_told_once():
    a, b = make_engine("a"), make_engine("b")
    step(a, {"a": [9]})
    step(a, {"a": [9, 1, 2, 3, 4]})
    a.finish(["a"])
    step(b, {"b": [9, 2, 3]})
    (told,) = pass_on(a, b)
    assert told.is_last
    assert step(b, {"b": [9, 2, 3]})["b"] == [4]
    assert a.exchange("x", []) == []
    assert counter(b, "prompt_bytes") > 0
    leave(b, ["b"])
    assert b.usage().bytes == b.usage().live_requests == 0


def test_nothing_is_kept_or_told_before_the_first_exchange_or_where_it_is_off():
    off = make_engine("a", share=False)
    step(off, {"a": [9, 1, 2, 3, 4]})
    off.finish(["a"])
    assert off.exchange("x", [piece([1, 2])]) == []
    assert enter(off, "b", identity(), [9, 1]) == [2, 3, 4], "its own siblings are there"


def test_a_piece_after_a_gap_begins_a_text_of_its_own():
    b = make_engine("b")
    step(b, {"b": [9, 2, 3]})
    b.exchange("y", [piece([1, 2, 3, 4]), piece([7, 2, 3, 5, 5], start=9)])
    assert step(b, {"b": [9, 2, 3]})["b"][0] == 5
    assert counter(b, "shared_missed_tokens") == 4, "not read before the gap"
    b.exchange("y", [piece([6], start=14)])
    assert step(b, {"b": [9, 5, 5]})["b"] == [6]


def test_few_tokens_are_read_per_step_whether_the_gate_is_open_or_closed():
    b = make_engine("b")
    texts = {"b": [999]}
    step(b, texts)
    waiting = [piece(np.arange(400), response=f"x/{n}") for n in range(4)]
    b.exchange("y", waiting)
    read = []
    for gate_open in (True, False, False, True, True):
        step(b, texts, gate_open=gate_open)
        read.append(counter(b, "shared_tokens"))
    assert read == [TOKENS_PER_STEP, 2 * TOKENS_PER_STEP, 3 * TOKENS_PER_STEP, 1600, 1600]
    assert counter(b, "catch_up_tokens") == 1601


def test_texts_wait_for_a_request_that_still_waits():
    b = make_engine("b")
    b.exchange("y", [piece([1, 2, 3, 4])])
    enter(b, "other", identity("h"), [9, 2, 3])
    assert counter(b, "shared_tokens") == 0
    step(b, {"b": [9, 2, 3], "other": [9, 2, 3]})
    assert step(b, {"b": [9, 2, 3], "other": [9, 2, 3]}) == {"b": [4], "other": []}


def test_texts_whose_requests_never_came_end_with_the_step():
    b = make_engine("b")
    b.exchange("y", [piece([1, 2, 3, 4], group="h")])
    assert b.usage().bytes == 16
    b.end_step()
    assert b.usage().bytes == 0
    assert counter(b, "shared_missed_tokens") == 4


@pytest.mark.parametrize("start", [WIDTH, 0])
def test_a_text_longer_than_its_row_is_refused_and_drafting_goes_on(start):
    b = make_engine("b")
    step(b, {"b": [9, 2, 3]})
    b.exchange("y", [piece([1, 2, 3, 4])])
    if start:
        b.exchange("y", [piece(np.zeros(start), response="x/2")])
    with pytest.raises(ValueError, match="x/2 has more than 4096 tokens"):
        b.exchange("y", [piece(np.zeros(WIDTH + 1 - start), start=start, response="x/2")])
    assert step(b, {"b": [9, 2, 3]})["b"] == [4]
    leave(b, ["b"])
    assert b.usage().bytes == 0


def test_own_texts_do_not_give_way_to_those_of_others():
    b = make_engine("b", max_bytes=1 << 20)
    text = np.random.default_rng(0).integers(0, VOCABULARY, WIDTH).tolist()
    step(b, {"b": text})
    for number in range(200):
        b.exchange("y", [piece(np.arange(500), response=f"x/{number}")])
        step(b, {"b": text})
    assert counter(b, "prompt_evictions") == 0
    assert counter(b, "shared_missed_tokens") > 0
    assert b.usage().bytes < 1 << 20


def test_texts_of_others_that_wait_go_before_any_group():
    most_bytes, number = 1 << 20, 0
    b, rng = make_engine("b", max_bytes=most_bytes), np.random.default_rng(0)
    while counter(b, "prompt_bytes") < 0.92 * most_bytes:
        name, number = f"h{number}", number + 1
        enter(b, name, identity(name), rng.integers(0, VOCABULARY, 500).tolist())
        b.finish([name])
    waiting = [piece(np.arange(WIDTH) % VOCABULARY, response=f"x/{place}") for place in range(8)]
    b.exchange("y", waiting)  # fills an eighth of the memory
    step(b, {"b": [9]})
    assert counter(b, "prompt_evictions") == 0
    assert counter(b, "shared_missed_tokens") == 8 * WIDTH
    assert b.usage().bytes <= most_bytes
    b.exchange("y", [piece([1, 2, 3], start=WIDTH - 3)])
    assert counter(b, "shared_missed_tokens") == 8 * WIDTH, "there is room again"


def test_a_group_that_was_given_up_takes_nothing_in():
    b = make_engine("b", max_bytes=1 << 20)
    b.admit("c", identity("h"))
    b.exchange("y", [piece([1, 2, 3, 4])])
    step(b, {"b": [9, 2, 3]})
    text = np.random.default_rng(0).integers(0, 1 << 30, (6, WIDTH)).tolist()
    for number, tokens in enumerate(text):
        enter(b, f"big {number}", identity(f"h{number}"), tokens)
    assert counter(b, "prompt_evictions") > 0
    before = counter(b, "shared_missed_tokens")
    b.exchange("y", [piece([5, 6], start=4)])
    assert counter(b, "shared_missed_tokens") == before + 2
    leave(b, ["b", *(f"big {number}" for number in range(6))])
    assert b.usage().bytes == b.usage().live_requests == 0


def test_what_nobody_asks_for_is_bounded_counted_and_freed():
    a = make_engine("a", max_bytes=1 << 20)  # 8 texts fill an eighth of it
    (pool,) = (one.pool for one in a.sources)
    for number in range(20):
        name = f"a{number}"
        enter(a, name, identity(sibling=number), [9])
        step(a, {name: [9] * 500})
        assert counter(a, "prompt_bytes") == pool.nbytes + 4 * 500 * min(number, 8)
        if number < 19:
            a.finish([name])
    told = a.exchange("x", [])
    assert [one.response for one in told] == [f"x/{number}" for number in range(12, 21)]
    assert [one.is_last for one in told] == [True] * 8 + [False]
    leave(a, ["a19"])
    assert a.usage().bytes == 0


def test_where_memory_holds_no_text_nothing_is_shared_and_that_is_named_once(caplog):
    drafter = drafter_of(longest=1 << 16, prompt={"max_bytes": 1 << 20})
    drafter.admit("b", identity())
    for _ in range(2):
        assert drafter.exchange("y", [piece([1, 2, 3, 4])]) == []
        step(drafter, {"b": [9, 1, 2, 1]})
    assert step(drafter, {"b": [9, 1, 2, 1]})["b"], "its own texts are there"
    assert counter(drafter, "shared_missed_tokens") == 8
    (warning,) = caplog.records
    assert "sam.sources.prompt.max_bytes = 1048576" in warning.getMessage()


def test_a_name_that_was_given_twice_does_not_mix_groups():
    b = make_engine("b")
    b.admit("h", identity("h"))
    texts = {"b": [9, 2, 3], "h": [9, 2, 3]}
    step(b, texts)
    b.exchange("y", [piece([1, 2, 3, 4])])
    b.exchange("y", [piece([1, 2, 3, 5], group="h"), piece([6, 7], group="h", start=9)])
    assert step(b, texts) == {"b": [], "h": []}
    leave(b, ["b", "h"])
    assert b.usage().bytes == b.usage().live_requests == 0
