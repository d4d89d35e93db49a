"""Word problems of one and two steps in English, for a small pretrained model.

A model of a hundred million parameters solves some of them and misses others, which is what
training with a verifiable reward needs. Names, things and numbers are drawn; a split's problems are
distinct, and those of the test split are not in the train split.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

DATA_SOURCE = "word_problems"
SPLIT_SIZES = {"train": 4096, "test": 256}
ASK = " Think step by step, and write the answer in the last line as: Answer: <number>"

_NAMES = ("Ann", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
_BOXES = ("bags", "boxes", "jars", "shelves", "trays")


@dataclass(frozen=True)
class WordProblem:
    """A question, its answer in decimal, and the number of its steps."""

    question: str
    answer: str
    steps: int


def _gain(rng: random.Random) -> tuple[str, int]:
    (name, thing), a, b = _who(rng), rng.randint(3, 30), rng.randint(2, 20)
    return f"{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have?", a + b


def _loss(rng: random.Random) -> tuple[str, int]:
    (name, thing), b = _who(rng), rng.randint(2, 15)
    a = b + rng.randint(2, 25)
    return f"{name} has {a} {thing} and gives {b} away. How many {thing} are left?", a - b


def _product(rng: random.Random) -> tuple[str, int]:
    (name, thing), a, b = _who(rng), rng.randint(2, 9), rng.randint(2, 12)
    boxes = rng.choice(_BOXES)
    return (
        f"{name} has {a} {boxes} with {b} {thing} each. How many {thing} does {name} have?",
        a * b,
    )


def _gain_and_loss(rng: random.Random) -> tuple[str, int]:
    (name, thing), a, b = _who(rng), rng.randint(5, 30), rng.randint(2, 20)
    c = rng.randint(2, a + b - 2)
    return (
        f"{name} has {a} {thing}, buys {b} more, and then gives {c} to a friend. "
        f"How many {thing} does {name} have now?",
        a + b - c,
    )


def _product_and_gain(rng: random.Random) -> tuple[str, int]:
    (name, thing), a, b, c = _who(rng), rng.randint(2, 8), rng.randint(2, 10), rng.randint(2, 15)
    boxes = rng.choice(_BOXES)
    return (
        f"{name} fills {a} {boxes} with {b} {thing} each and has {c} {thing} left over. "
        f"How many {thing} does {name} have in all?",
        a * b + c,
    )


def _twice(rng: random.Random) -> tuple[str, int]:
    (name, thing), a = _who(rng), rng.randint(3, 25)
    other = rng.choice([one for one in _NAMES if one != name])
    return (
        f"{name} has {a} {thing}. {other} has twice as many. "
        f"How many {thing} do they have together?",
        3 * a,
    )


_KINDS: tuple[tuple[int, Callable[[random.Random], tuple[str, int]]], ...] = (
    (1, _gain), (1, _loss), (1, _product), (2, _gain_and_loss), (2, _product_and_gain), (2, _twice),
)  # fmt: skip


def _who(rng: random.Random) -> tuple[str, str]:
    return rng.choice(_NAMES), rng.choice(_THINGS)


def draw_split(split: str) -> list[WordProblem]:
    """The problems of the train or the test split; the same on every machine."""
    rng, seen = random.Random(1), set()
    splits: dict[str, list[WordProblem]] = {}
    for name, count in SPLIT_SIZES.items():  # in one sequence: no question is in two splits
        found = splits[name] = []
        while len(found) < count:
            steps, make = rng.choice(_KINDS)
            question, answer = make(rng)
            if question not in seen:
                seen.add(question)
                found.append(WordProblem(question + ASK, str(answer), steps))
    return splits[split]
