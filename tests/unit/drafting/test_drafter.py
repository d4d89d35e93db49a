"""The drafter as an engine drives it: requests that come, go, move, pause and grow."""

import numpy as np
import pytest

from sam_rollout.config import GateConfig, SamConfig, SourcesConfig
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.sources.own import OwnSourceConfig
from tests.unit.drafting.texts import expected_draft, int32, step


def make_drafter(k=3, max_rows=8, max_model_len=4096, max_bytes=1 << 30):
    sources = SourcesConfig(own=OwnSourceConfig(max_bytes=max_bytes))
    return SamDrafter(SamConfig(max_draft_tokens=k, sources=sources), max_rows, max_model_len)


def test_a_closed_gate_reads_but_does_not_draft():
    drafter = make_drafter()
    assert step(drafter, {"a": [1, 2, 1]}, gate_open=False) == {"a": []}
    assert drafter.usage().catch_up_tokens == 3
    assert step(drafter, {"a": [1, 2, 1]}) == {"a": [2, 1, 2]}
    assert drafter.usage().catch_up_tokens == 3
    # Counts of an open step must not linger.
    assert step(drafter, {"a": [1, 2, 1]}, gate_open=False) == {"a": []}


def test_rows_that_are_not_eligible_are_left_alone():
    drafter = make_drafter()
    texts = {"prefill": [1, 2, 1], "decode": [3, 4, 3]}
    assert step(drafter, texts, eligible=[False, True]) == {"prefill": [], "decode": [4, 3, 4]}
    assert drafter.usage().catch_up_tokens == 3
    assert step(drafter, texts)["prefill"] == [2, 1, 2]


@pytest.mark.parametrize(
    ("max_tokens", "drafted"),
    [
        (2, [2, 2, 2, 2]),
        (np.full(4, 2, np.int64), [2, 2, 2, 2]),
        (int32(0, -5, 1, 99), [0, 0, 1, 3]),
    ],
)
def test_max_tokens_for_all_rows_or_each(max_tokens, drafted):
    drafts = step(make_drafter(), {name: [1, 1, 1] for name in "abcd"}, max_tokens=max_tokens)
    assert [len(draft) for draft in drafts.values()] == drafted


def test_drafts_end_at_the_longest_text():
    drafter = make_drafter(max_model_len=10)
    lengths = {n: len(step(drafter, {f"r{n}": [1] * n}, width=10)[f"r{n}"]) for n in range(2, 11)}
    assert lengths == {2: 3, 3: 3, 4: 3, 5: 3, 6: 3, 7: 3, 8: 2, 9: 1, 10: 0}


def test_finish_frees_everything_and_may_be_repeated():
    drafter = make_drafter()
    step(drafter, {"a": [1] * 100, "b": [2] * 100})
    assert drafter.usage().bytes > 0
    drafter.finish(["a", "b", "never seen"])
    drafter.finish(["a"])
    usage = drafter.usage()
    assert (usage.live_requests, usage.bytes, usage.evictions) == (0, 0, 0)


def test_an_id_used_again_without_finish_is_noticed():
    drafter = make_drafter()
    step(drafter, {"a": [1, 2, 3, 1, 2]})
    assert step(drafter, {"a": [5, 6, 7, 5, 6, 5]}) == {"a": [6, 5, 6]}
    assert step(drafter, {"a": [5, 6]}) == {"a": []}
    assert drafter.usage().rebuilds == 2


def test_the_engines_list_of_ids_may_change_in_place():
    drafter = make_drafter()
    ids = ["a", "b"]
    token_ids = np.array([[1, 2, 1], [3, 4, 3]], np.int32)
    lengths, eligible = int32(3, 3), np.ones(2, bool)
    drafter.step(ids, token_ids, lengths, eligible, gate_open=True)
    ids.reverse()
    drafter.step(ids, token_ids[::-1], lengths, eligible, gate_open=True)
    assert drafter.usage().rebuilds == 0


def test_a_preempted_request_keeps_its_automaton():
    drafter = make_drafter()
    step(drafter, {"a": [1, 2, 3, 1], "b": [9]})
    for _ in range(20):
        step(drafter, {"b": [9]})
    assert step(drafter, {"a": [1, 2, 3, 1, 2]}) == {"a": [3, 1, 2]}
    assert drafter.usage().catch_up_tokens == 4 + 1 + 1


def test_the_longest_absent_is_evicted_first():
    drafter = make_drafter(max_rows=2)  # at most 20 live
    for i in range(20):
        step(drafter, {f"r{i}": [i, i, i]})
    assert drafter.usage().evictions == 0
    step(drafter, {"r0": [0, 0, 0]})  # back: now r1 is the longest absent
    step(drafter, {"new": [7, 7]})
    usage = drafter.usage()
    assert (usage.live_requests, usage.evictions) == (20, 1)
    read = usage.catch_up_tokens
    step(drafter, {"r0": [0, 0, 0]})
    assert drafter.usage().catch_up_tokens == read
    assert step(drafter, {"r1": [1, 1, 1]}) == {"r1": [1, 1, 1]}
    assert drafter.usage().catch_up_tokens == read + 3


def repetitive_texts(rows, tokens):
    """New stretches and copied ones, the same on every machine: int32[rows, tokens]."""
    numbers = np.random.PCG64(7).random_raw(8 * rows * tokens)
    numbers = iter((numbers >> 20).tolist())
    texts = []
    for _ in range(rows):
        text = []
        while len(text) < tokens:
            if text and next(numbers) % 2:
                start = next(numbers) % len(text)
                text += text[start : start + 2 + next(numbers) % 18]
            else:
                text += [next(numbers) % (1 << next(numbers) % 18) for _ in range(4)]
        texts.append(text[:tokens])
    return np.array(texts, np.int32)


LONG_TEXT = [1, 2, 3] * 9000  # over half a MiB


def test_max_bytes_takes_from_absent_requests_first():
    drafter = make_drafter(max_model_len=30_000, max_bytes=1 << 20)
    step(drafter, {"absent": LONG_TEXT}, width=30_000)
    for _ in range(3):
        assert step(drafter, {"present": LONG_TEXT}, width=30_000)["present"]
    usage = drafter.usage()
    assert (usage.live_requests, usage.evictions) == (1, 1)
    assert usage.bytes <= 1 << 20


def test_max_bytes_suspends_the_smallest_present_request_until_memory_returns():
    drafter = make_drafter(max_model_len=30_000, max_bytes=1 << 20)
    texts = {"small": LONG_TEXT[:24000], "large": LONG_TEXT}
    step(drafter, texts, width=30_000)
    for _ in range(3):
        drafts = step(drafter, texts, width=30_000)
        assert drafts["small"] == [] and len(drafts["large"]) == 3
    usage = drafter.usage()
    assert usage.bytes <= 1 << 20
    assert usage.evictions == 1  # not once per step
    drafter.finish(["large"])
    assert len(step(drafter, {"small": texts["small"]}, width=30_000)["small"]) == 3
    assert drafter.usage().live_requests == 1


def test_a_request_too_large_for_the_cap_never_comes_back():
    drafter = make_drafter(max_model_len=60_000, max_bytes=1 << 20)
    huge = LONG_TEXT * 2
    for other in ({}, {"b": [1, 1]}, {}, {"c": [1, 1]}):
        step(drafter, {"huge": huge, **other}, width=60_000)
    usage = drafter.usage()
    assert usage.evictions == 1
    assert usage.catch_up_tokens == len(huge) + 2 + 2
    drafter.finish(["huge"])
    assert step(drafter, {"huge": [1, 1]}) == {"huge": [1, 1, 1]}


def test_512_rows():
    drafter = make_drafter(max_rows=512, max_model_len=200)
    rng = np.random.default_rng(3)
    texts = {f"r{i}": rng.integers(0, 9, 100 + i % 50).tolist() for i in range(512)}
    drafts = step(drafter, texts, width=200)
    for request_id in list(texts)[::61]:
        assert drafts[request_id] == expected_draft(texts[request_id], 3)
    assert drafter.usage().live_requests == 512


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
    batch = drafter.step(["a"], prompt, int32(length), np.ones(1, bool), gate_open=True)
    assert batch.to_lists() == [prompt[0, 106:109].tolist()]
    assert drafter.usage().bytes / length < 80


def test_misuse_is_refused():
    drafter = make_drafter(max_rows=2)
    one = np.ones((3, 4), np.int32)
    with pytest.raises(ValueError, match="3 requests, more than max_rows = 2"):
        drafter.step(list("abc"), one, int32(1, 1, 1), np.ones(3, bool), gate_open=True)
    with pytest.raises(ValueError, match="a request id occurs twice"):
        drafter.step(["a", "a"], one, int32(1, 1), np.ones(2, bool), gate_open=True)
    with pytest.raises(ValueError, match=r"2 requests, but num_tokens\[1\]"):
        drafter.step(["a", "b"], one, int32(1), np.ones(2, bool), gate_open=True)
    with pytest.raises(TypeError, match="lengths must be int32"):
        drafter.step(["a"], one, np.array([1]), np.ones(1, bool), gate_open=True)
    with pytest.raises(ValueError, match=r"sam\.enabled is false"):
        SamDrafter(SamConfig(enabled=False), 2, 10)
    with pytest.raises(ValueError, match="max_model_len = 16777217: automata read no more than"):
        SamDrafter(SamConfig(), 2, (1 << 24) + 1)
    with pytest.raises(TypeError, match=r"token_ids must be int32\[R, L\], got int64"):
        drafter.step(["a"], one.astype(np.int64), int32(1), np.ones(1, bool), gate_open=True)
    with pytest.raises(ValueError, match="must be at least 1"):
        SamDrafter(SamConfig(gate=GateConfig("threshold", 0)), 0, 10)
