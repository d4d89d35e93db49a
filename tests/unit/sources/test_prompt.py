from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.drafting.texts import counter, drafter_of, enter, groups, identity, leave, step


def make_drafter(*names, k=3, max_rows=8, own=True, max_bytes=1 << 30):
    others = ["own"] if own else []
    drafter = drafter_of(*others, k=k, max_rows=max_rows, prompt={"max_bytes": max_bytes})
    admitted(drafter, "g", *names)
    return drafter


def admitted(drafter, group, *names, **who):
    for sibling, name in enumerate(names):
        drafter.admit(name, identity(group, sibling, **who))


def test_finished_responses_stay_until_the_step_ends():
    drafter = make_drafter("a", "b")
    step(drafter, {"a": [9, 1, 2, 3, 4, 5]})
    drafter.finish(["a"])
    assert step(drafter, {"b": [9, 6, 2, 3]}) == {"b": [4, 5]}
    drafter.end_step()
    assert groups(drafter) == 1, "b is still running"
    drafter.finish(["b"])
    assert groups(drafter) == 0
    drafter.end_step()
    assert drafter.usage().bytes == 0


@pytest.mark.parametrize(
    "other", [identity("h"), identity("g", step=2), identity("g", split="val"), None]
)
def test_a_request_of_another_prompt_step_or_split_shares_nothing(other):
    drafter = make_drafter("a")
    step(drafter, {"a": [9, 1, 2, 3, 4, 5]})
    assert enter(drafter, "b", other, [8, 6, 2, 3]) == []


def test_an_id_used_again_is_another_sibling():
    drafter = make_drafter("a", "b")
    step(drafter, {"a": [9, 1, 2, 3, 4, 5], "b": [9]})
    drafter.finish(["a"])
    drafter.admit("a", identity("g", 2))
    assert step(drafter, {"b": [9, 6], "a": [9, 7, 2, 3]})["a"] == [4, 5]
    assert drafter.usage().rebuilds == 0
    assert step(drafter, {"a": [8, 2, 3], "b": [9]})["a"] == [4, 5]


def test_max_bytes_gives_up_the_group_absent_longest_and_leaves_it_given_up():
    drafter = make_drafter(max_bytes=1 << 20)
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 1000, 9000).tolist() for _ in range(3)]
    for number, text in enumerate(texts):
        enter(drafter, str(number), identity(f"g{number}"), text)
    assert counter(drafter, "prompt_evictions") == 1
    assert counter(drafter, "prompt_bytes") <= 1 << 20
    drafter.admit("late", identity("g0", 1))
    step(drafter, {"0": texts[0], "late": texts[0][:10]})
    assert groups(drafter) == 2
    leave(drafter, ["0", "late"])
    assert groups(drafter) == 2, "1 and 2 are alive"
    enter(drafter, "new", identity("g0", 1), [1, 2])
    assert groups(drafter) == 3


def test_a_prompt_whose_responses_have_ended_goes_before_one_that_pauses():
    drafter = make_drafter(own=False, max_bytes=1 << 20)
    texts = np.random.default_rng(0).permutation(27_000).reshape(3, 9000).tolist()
    for number, text in enumerate(texts):
        enter(drafter, str(number), identity(f"g{number}"), text)
        if number == 1:
            drafter.finish(["1"])
    assert counter(drafter, "prompt_evictions") == 1
    admitted(drafter, "g0", "a")
    admitted(drafter, "g1", "b")
    starts = {"a": [5, *texts[0][50:54]], "b": [5, *texts[1][50:54]]}
    assert step(drafter, starts) == {"a": texts[0][54:57], "b": []}


def test_requests_of_a_group_that_was_given_up_are_never_read_again():
    drafter = make_drafter("a", "late", own=False, max_bytes=1 << 20)
    text = np.random.default_rng(0).integers(0, 1000, 40_000).tolist()
    step(drafter, {"a": text})
    step(drafter, {"a": text, "late": [1]})
    read = drafter.usage().catch_up_tokens
    drafter.end_step()
    admitted(drafter, "g", "next")
    texts = {"next": [1, 2, 3], "a": text, "late": [1, 2]}
    assert step(drafter, texts) == {"next": [], "a": [], "late": []}
    assert drafter.usage().catch_up_tokens == read + 3
    drafter.finish(list(texts))
    assert groups(drafter) == 1, "its step is not over"


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
                drafter.finish([name])
                ended.append(known.pop(name))
                if name in present:
                    present.remove(name)
        drafts = step(drafter, {name: known[name] for name in present})
        written = {pair for text in (*known.values(), *ended) for pair in pairwise(text)}
        for name, draft in drafts.items():
            last = known[name][-1:]
            assert bool(draft) == any([before] == last for before, _ in written)
            assert {*pairwise([*last, *draft])} <= written
    assert drafter.usage().rebuilds == 0
