import enum
import json
import math
from pathlib import Path

import numpy as np
import pytest

from sam_rollout.core.json_values import dumps, encode, loads, measured


class Colour(enum.Enum):
    RED = 1


class Status(enum.StrEnum):
    FAIL = "fail"


def strictly(text: str):
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize(
    ("value", "written", "back"),
    [
        (math.inf, "inf", math.inf),
        ({"a": [-math.inf, 1.5]}, {"a": ["-inf", 1.5]}, {"a": [-math.inf, 1.5]}),
        (np.float32(np.inf), "inf", math.inf),
        (np.float64(0.5), 0.5, 0.5),
        (np.int64(3), 3, 3),
        (np.bool_(True), True, True),
        (np.array([1.0, np.inf]), [1.0, "inf"], [1.0, math.inf]),
        (Path("/a/b"), "/a/b", "/a/b"),
        (Colour.RED, "RED", "RED"),
        (Status.FAIL, "fail", "fail"),
        (b"text\xff", "text\\xff", "text\\xff"),
        ({"b", "a"}, ["a", "b"], ["a", "b"]),
        ((1, None, True), [1, None, True], [1, None, True]),
        ({4: 2, True: 1, None: 0, 0.5: 3, Colour.RED: 4},
         {"4": 2, "true": 1, "null": 0, "0.5": 3, "RED": 4},
         {"4": 2, "true": 1, "null": 0, "0.5": 3, "RED": 4}),
        ("infinite", "infinite", "infinite"),
        (complex(1, 2), "(1+2j)", "(1+2j)"),
    ],
)  # fmt: skip
def test_a_value_is_written_as_json_and_read_back(value, written, back):
    text = dumps(value)
    assert strictly(text) == written == encode(value)
    assert loads(text) == back


def test_what_is_no_number_is_read_back_and_equal_when_written():
    assert math.isnan(loads(dumps(math.nan))) and math.isnan(loads(dumps(np.float32("nan"))))
    assert encode({"lr": math.nan}) == encode({"lr": -math.nan}) == {"lr": "nan"}


@pytest.mark.parametrize("text", ["[Infinity, -Infinity]", '["Infinity", "-Infinity"]'])
def test_what_other_programs_write_is_read(text):
    assert loads(text) == [math.inf, -math.inf]


def test_of_measured_values_only_numbers_stay():
    assert measured({"a": [math.nan, 1.0, (-math.inf,)], "b": "nan"}) == {
        "a": [None, 1.0, [None]], "b": "nan",
    }  # fmt: skip
