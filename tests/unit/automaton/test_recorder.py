import numpy as np
import pytest

from sam_rollout.automaton.recorder import CONTEXT, TextRecorder
from tests.unit.automaton.pools import int32


def test_responses_are_recorded_with_the_end_of_their_prompts():
    rng = np.random.default_rng(0)
    recorder = TextRecorder(3, 200)
    texts = rng.integers(0, 1000, (2, 200)).astype(np.int32)
    slots = int32(recorder.open(), recorder.open())
    lengths, prompts = int32(51, 4), (50, 3)
    while lengths.max() < 190:
        recorder.record(slots, texts, lengths, rng.random(2) < 0.7)
        lengths += rng.integers(1, 5, 2).astype(np.int32)
        if lengths.min() < 60:  # at first, both rows are eligible
            recorder.record(slots, texts, lengths, np.ones(2, bool))
    recorder.record(slots, texts[::-1][::-1], lengths, np.ones(2, bool))
    for row in range(2):
        recorded = recorder.take(slots[row])
        first = lengths[row] - len(recorded)
        assert np.array_equal(recorded, texts[row, first : lengths[row]])
        assert max(0, prompts[row] - CONTEXT) <= first <= prompts[row] + 8


def test_slots_are_limited_and_used_again():
    recorder = TextRecorder(2, 10)
    slots = [recorder.open(), recorder.open()]
    assert sorted(slots) == [0, 1] and recorder.open() == -1
    row = int32(*range(10))[None]
    recorder.record(int32(-1), row, int32(5), np.ones(1, bool))
    recorder.record(int32(slots[0]), row, int32(5), np.zeros(1, bool))
    assert recorder.take(slots[0]).tolist() == []
    assert recorder.open() == slots[0]


@pytest.mark.parametrize("cut", [3, 1])
def test_a_text_that_was_cut_is_followed(cut):
    recorder = TextRecorder(1, 10)
    slot = recorder.open()
    recorder.record(int32(slot), int32(*range(10))[None], int32(2), np.ones(1, bool))
    recorder.record(int32(slot), int32(*range(10))[None], int32(9), np.ones(1, bool))
    other = int32(*range(0, 100, 10))[None]
    recorder.record(int32(slot), other, int32(cut), np.ones(1, bool))
    recorder.record(int32(slot), other, int32(5), np.ones(1, bool))
    assert recorder.take(slot).tolist() == [*range(cut), *range(10 * cut, 50, 10)]


def test_memory_is_what_was_ever_written():
    recorder = TextRecorder(2, 100)
    row, is_eligible = np.zeros((1, 100), np.int32), np.ones(1, bool)
    assert recorder.nbytes == 0
    slot = recorder.open()
    for length, tokens in ((1, 1), (40, 40), (20, 40)):
        recorder.record(int32(slot), row, int32(length), is_eligible)
        assert recorder.nbytes == 4 * tokens, "memory is kept"
    recorder.take(slot)
    assert recorder.open() == slot and recorder.nbytes == 160
    for length, tokens in ((1, 40), (30, 40), (50, 50)):
        recorder.record(int32(slot), row, int32(length), is_eligible)
        assert recorder.nbytes == 4 * tokens
    other = recorder.open()
    recorder.record(int32(other), row, int32(5), is_eligible)
    assert recorder.nbytes == 4 * 55
