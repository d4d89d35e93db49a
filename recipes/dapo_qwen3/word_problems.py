"""Draws word problems of one and two steps in English, for a small pretrained model.

No problem occurs twice in a split, or in both splits.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DATA_SOURCE = "word_problems"
SPLIT_SIZES = {"train": 4096, "test": 256}

#: These turns precede each question, because a model without an example does not write "Answer:".
EXAMPLE = (
    ("user", "Tom has 8 pencils and buys 5 more. How many pencils does Tom have?"),
    ("assistant", "Tom has 8 pencils. He buys 5 more, so he has 8 + 5 = 13 pencils.\n\nAnswer: 13"),
)

_NAMES = ("Ann", "Ben", "Carla", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
_THINGS = ("apples", "books", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
_BOXES = ("bags", "boxes", "jars", "shelves", "trays")


@dataclass(frozen=True)
class Kind:
    """A kind of problem: its text, each number's range, and a function that returns the answer."""

    text: str
    numbers: tuple[tuple[int, int], ...]
    answer: Callable[..., int]


KINDS = {
    "gain": Kind(
        "{name} has {0} {things} and gets {1} more. How many {things} does {name} have?",
        ((2, 20), (2, 9)),
        lambda a, b: a + b,
    ),
    "loss": Kind(
        "{name} has {0} {things} and gives {1} away. How many {things} are left?",
        ((10, 20), (2, 9)),
        lambda a, b: a - b,
    ),
    "product": Kind(
        "{name} has {0} {boxes} with {1} {things} each. How many {things} does {name} have?",
        ((2, 9), (2, 9)),
        lambda a, b: a * b,
    ),
    "gain and loss": Kind(
        "{name} has {0} {things}, buys {1} more, and then gives {2} to a friend. "
        "How many {things} does {name} have now?",
        ((5, 15), (2, 9), (2, 6)),
        lambda a, b, c: a + b - c,
    ),
    "product and gain": Kind(
        "{name} fills {0} {boxes} with {1} {things} each and has {2} more. "
        "How many {things} does {name} have in all?",
        ((2, 5), (2, 9), (2, 9)),
        lambda a, b, c: a * b + c,
    ),
    "twice": Kind(
        "{name} has {0} {things}. {other} has twice as many. "
        "How many {things} do they have together?",
        ((2, 12),),
        lambda a: 3 * a,
    ),
}


@dataclass(frozen=True)
class WordProblem:
    question: str
    answer: str
    kind: str

    @property
    def chat(self) -> list[dict[str, str]]:
        turns = (*EXAMPLE, ("user", self.question))
        return [{"role": role, "content": content} for role, content in turns]

    @property
    def details(self) -> dict[str, str]:
        return {"kind": self.kind}


def listed(problems: Sequence[WordProblem]) -> WordProblem:
    """Return one problem that lists the given problems; its response is long."""
    numbered = (f"{number}. {one.question}" for number, one in enumerate(problems, 1))
    question = "\n".join(("Solve each of these problems, one after the other.", *numbered))
    return WordProblem(question, problems[-1].answer, "list")


def draw_problem(rng: random.Random) -> WordProblem:
    kind = rng.choice(list(KINDS))
    numbers = [rng.randint(*limits) for limits in KINDS[kind].numbers]
    name, other = rng.sample(_NAMES, 2)
    words = {
        "name": name,
        "other": other,
        "things": rng.choice(_THINGS),
        "boxes": rng.choice(_BOXES),
    }
    question = KINDS[kind].text.format(*numbers, **words)
    return WordProblem(question, str(KINDS[kind].answer(*numbers)), kind)


def draw_split(split: str) -> list[WordProblem]:
    rng, seen = random.Random(1), set()
    splits: dict[str, list[WordProblem]] = {}
    for name, count in SPLIT_SIZES.items():
        found = splits[name] = []
        while len(found) < count:
            problem = draw_problem(rng)
            if problem.question not in seen:
                seen.add(problem.question)
                found.append(problem)
    return splits[split]
