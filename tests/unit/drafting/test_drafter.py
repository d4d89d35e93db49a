import numpy as np
import pytest

from tests.unit.drafting.texts import counter, drafter_of, drive, int32, step


def make_drafter(k=3, max_rows=8, max_model_len=4096, max_bytes=1 << 30):
    own = {"max_bytes": max_bytes}
    return drafter_of(k=k, max_rows=max_rows, longest=max_model_len, own=own)


def test_the_engines_list_of_ids_may_change_in_place():
    drafter = make_drafter()
    ids = ["a", "b"]
    token_ids = np.array([[1, 2, 1], [3, 4, 3]], np.int32)
    drive(drafter, ids, token_ids, int32(3, 3))
    ids.reverse()
    drive(drafter, ids, token_ids[::-1], int32(3, 3))
    assert drafter.usage().rebuilds == 0


def test_the_longest_absent_is_evicted_first():
    drafter = make_drafter(max_rows=2)  # keeps at most 20 requests
    for i in range(20):
        step(drafter, {f"r{i}": [i, i, i]})
    assert drafter.usage().evictions == 0
    step(drafter, {"r0": [0, 0, 0]})  # r0 is back, so r1 has now been absent longest
    step(drafter, {"new": [7, 7]})
    usage = drafter.usage()
    assert (usage.live_requests, usage.evictions) == (20, 1)
    read = usage.catch_up_tokens
    step(drafter, {"r0": [0, 0, 0]})
    assert drafter.usage().catch_up_tokens == read
    assert step(drafter, {"r1": [1, 1, 1]}) == {"r1": [1, 1, 1]}
    assert drafter.usage().catch_up_tokens == read + 3


LONG_TEXT = [1, 2, 3] * 9000  # its automaton takes over half a MiB


def test_max_bytes_takes_from_absent_requests_first():
    drafter = make_drafter(max_model_len=30_000, max_bytes=1 << 20)
    step(drafter, {"absent": LONG_TEXT})
    for _ in range(3):
        assert step(drafter, {"present": LONG_TEXT})["present"]
    usage = drafter.usage()
    assert (usage.live_requests, usage.evictions) == (1, 1)
    assert usage.bytes <= 1 << 20
    assert 0 < counter(drafter, "own_bytes") <= usage.bytes and counter(drafter, "own_evictions")


def test_max_bytes_takes_from_the_smallest_present_request_for_good():
    drafter = make_drafter(max_model_len=30_000, max_bytes=1 << 20)
    texts = {"small": LONG_TEXT[:24000], "large": LONG_TEXT}
    step(drafter, texts)
    for _ in range(3):
        drafts = step(drafter, texts)
        assert drafts["small"] == [] and len(drafts["large"]) == 3
    usage = drafter.usage()
    assert usage.bytes <= 1 << 20
    assert usage.evictions == 1  # one eviction, not one per step
    drafter.finish(["large"])
    assert step(drafter, {"small": texts["small"]})["small"] == []
    assert drafter.usage().live_requests == 0


def test_a_request_too_large_for_the_cap_never_comes_back():
    drafter = make_drafter(max_model_len=60_000, max_bytes=1 << 20)
    huge = LONG_TEXT * 2
    for other in ({}, {"b": [1, 1]}, {}, {"c": [1, 1]}):
        step(drafter, {"huge": huge, **other})
    usage = drafter.usage()
    assert usage.evictions == 1
    assert usage.catch_up_tokens == len(huge) + 2 + 2
    drafter.finish(["huge"])
    assert step(drafter, {"huge": [1, 1]}) == {"huge": [1, 1, 1]}


def test_an_empty_batch_and_an_empty_prompt():
    drafter = make_drafter()
    assert step(drafter, {}) == {}
    assert step(drafter, {"a": []}) == {"a": []}
    assert step(drafter, {"a": [0, 0]}) == {"a": [0, 0, 0]}


def test_a_prompt_of_a_million_tokens():
    length = 1_200_000
    drafter = make_drafter(max_rows=1, max_model_len=length + 10)
    prompt = np.random.default_rng(0).integers(0, 150_000, (1, length + 10)).astype(np.int32)
    prompt[0, length - 6 : length] = prompt[0, 100:106]
    batch = drive(drafter, ["a"], prompt, int32(length))
    assert batch.to_lists() == [prompt[0, 106:109].tolist()]
    assert drafter.usage().bytes / length < 80


def test_misuse_is_refused():
    drafter, one = make_drafter(max_rows=2), np.ones((2, 4), np.int32)
    drafter.bind(["a", "b"])
    with pytest.raises(ValueError, match=r"2 requests, but num_tokens\[1\]"):
        drafter.observe(one, int32(1), int32(1, 1))
    for tokens, lengths in ((one, np.array([1, 1])), (one.astype(np.int64), int32(1, 1))):
        with pytest.raises(TypeError, match="No matching definition"):
            drafter.draft(tokens, lengths, np.ones(2, bool), gate_open=True)
