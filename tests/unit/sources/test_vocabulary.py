"""Texts from outside are held to the model's vocabulary, and so is every draft."""

import logging

import numpy as np
import pytest

from sam_rollout.sources.support.text_store import TextStore
from tests.unit.drafting.texts import counter, drafter_of, identity, step
from tests.unit.sources.test_earlier_steps import responded

VOCABULARY, LARGER = 512, 1 << 20
ALL = 1 << 30


def make_drafter(name, folder, vocabulary):
    section = {"when": "always"} if name == "run" else {}
    return drafter_of(path=folder, longest=4096, vocabulary=vocabulary, **{name: section})


@pytest.mark.parametrize("name", ["run", "prompt"])
def test_texts_of_a_model_with_a_larger_vocabulary_are_dropped_counted_and_named_once(
    name, tmp_path, caplog
):
    foreign, known = list(range(5000, 5200)), list(range(100, 300))
    mixed = [*known[:150], 5000, *range(400, 440)]
    before = make_drafter(name, tmp_path / "texts", LARGER)
    for number, text in enumerate((foreign, known, mixed), start=1):
        responded(before, f"r{number}", identity(step=number), text, prompt=[])
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


def test_texts_that_are_dropped_take_no_room_from_others(tmp_path):
    writer = TextStore(tmp_path, 1 << 20, 16, LARGER)
    for number, token in enumerate((3, 4, 5000, 5000)):
        writer.append("g", number, np.full(10, token, np.int32))
    reader = TextStore(tmp_path, 1 << 20, 16, VOCABULARY)
    assert [text[0] for text in reader.read("g", ALL, max_tokens=20)] == [3, 4]
