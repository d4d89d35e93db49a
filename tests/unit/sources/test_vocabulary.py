"""Texts from outside are held to the model's vocabulary, and so is every draft."""

import logging

import numpy as np
import pytest

from sam_rollout.sources.support.text_store import CLOSED, TextStore
from tests.unit.drafting.texts import counter, drafter_of, identity, step

VOCABULARY, LARGER = 512, 1 << 20
ALL = 1 << 30


def make_drafter(name, folder, vocabulary):
    section = {"when": "always"} if name == "run" else {}
    return drafter_of(path=folder, longest=4096, vocabulary=vocabulary, **{name: section})


def write(drafter, request, text, number):
    """A request of training step `number` samples a text, and ends."""
    drafter.admit(request, identity(step=number))
    for length in (1, len(text)):
        step(drafter, {request: text[:length]})
    drafter.finish([request])
    drafter.wait()


@pytest.mark.parametrize("name", ["run", "prompt"])
def test_texts_of_a_model_with_a_larger_vocabulary_are_dropped_counted_and_named_once(
    name, tmp_path, caplog
):
    foreign, known = list(range(5000, 5200)), list(range(100, 300))
    mixed = [*known[:150], 5000, *range(400, 440)]
    before = make_drafter(name, tmp_path / "texts", LARGER)
    for number, text in enumerate((foreign, known, mixed), start=1):
        write(before, f"r{number}", text, number)
    again = make_drafter(name, tmp_path / "texts", VOCABULARY)
    again.admit("a", identity(step=9))
    with caplog.at_level(logging.WARNING):
        step(again, {"a": [7]})
        again.wait()
        step(again, {"a": [7, 7]})
        again.admit("b", identity(step=9))
        found = step(again, {"a": [7, 7, *known[50:54]], "b": [7, *mixed[155:165]]})
    assert found == {"a": known[54:57], "b": []}
    assert counter(again, "refused_texts") == 2 and counter(again, "unknown_tokens") == 0
    (warning,) = caplog.messages
    for part in (str(tmp_path / "texts"), "another model", "the model has 512"):
        assert part in warning
    assert counter(again, "texts_failures") == 0


@pytest.mark.parametrize("id_", [-1, -(2**31), VOCABULARY, 2**31 - 1])
def test_no_id_beside_the_vocabulary_comes_back(id_, tmp_path):
    writer = TextStore(tmp_path, 1 << 20, 16, LARGER)
    for number, token in enumerate((VOCABULARY - 1, id_)):
        writer.append("g", number, np.array([0, token], np.int32))
    reader = TextStore(tmp_path, 1 << 20, 16, VOCABULARY)
    assert [text.tolist() for text in reader.read("g", ALL, ALL)] == [[0, VOCABULARY - 1]]
    assert reader.refused == 1


def test_texts_that_are_dropped_take_no_room_from_others(tmp_path):
    writer = TextStore(tmp_path, 1 << 20, 16, LARGER)
    for number, token in enumerate((3, 4, 5000, 5000)):
        writer.append("g", number, np.full(10, token, np.int32))
    reader = TextStore(tmp_path, 1 << 20, 16, VOCABULARY)
    assert [text[0] for text in reader.read("g", ALL, max_tokens=20)] == [3, 4]


@pytest.mark.parametrize("place", ["magic", "text", "end"])
def test_damage_costs_the_engine_nothing_and_is_counted_once(place, tmp_path, caplog):
    """A file of another version, a flipped bit, and one that was cut short."""
    writer = TextStore(tmp_path, 1 << 20, 16, LARGER)
    writer.append("g", 1, np.arange(50, dtype=np.int32))
    writer.close()
    (segment,) = tmp_path.glob(f"*{CLOSED}")
    content = bytearray(segment.read_bytes())
    if place == "magic":
        content[3] ^= 1
    elif place == "text":
        content[-1] ^= 1
    segment.write_bytes(content[:-5] if place == "end" else content)
    drafter = make_drafter("prompt", tmp_path, VOCABULARY)
    drafter.admit("a", identity(step=2))
    step(drafter, {"a": [1, 2]})
    drafter.wait()
    assert step(drafter, {"a": [1, 2, 3]}) == {"a": []}
    drafter.admit("b", identity("other", step=3))
    step(drafter, {"b": [1, 2]})  # the folder is looked at anew
    drafter.wait()
    assert counter(drafter, "refused_texts") == 1
    assert counter(drafter, "texts_failures") == 0
    (warning,) = caplog.messages
    assert str(tmp_path) in warning and segment.name in warning
