"""A synthetic mathematics task that shows reinforcement learning and speculation on a tiny model.

A problem is a chain of two to twelve labelled operands (``a=+312,b=-47,c=+650``). There are four
families of problems: signed totals, totals modulo a power of ten, products modulo a hundred, sums
of products. A demonstration is a response that works through the chain one to four times; each time
is called a pass. A step of a pass is worked in one of two ways:

* In columns: digit by digit with carries. The result is almost always right (``COLUMN_SLIP``).
* In the head: the result is written at once, and is often wrong (``HEAD_SLIP``).

The result of the last pass is the answer. A model that imitates demonstrations gives a right answer
about every second time. Policy-gradient training shows an effect within a few training steps,
because the model only has to work in columns more often. The lengths of responses vary by an order
of magnitude, so a rollout has a long tail.
"""

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

DATA_SOURCE = "synthetic_math"
FAMILIES = ("total", "modular_total", "modular_product", "sum_of_products")
LABELS = "abcdefghijkl"
PLACES = ("ones", "tens", "hundreds", "thousands", "ten-thousands")

#: Number of problems in each split, and the seed from which the split is drawn.
SPLIT_SIZES = {"train": 2048, "test": 256}
SPLIT_SEEDS = {"train": 1, "test": 2}
#: Chance that the result of a step is wrong if the step is worked in columns.
COLUMN_SLIP = 0.002
#: Chance that the result of a step is wrong if the step is done in the head.
HEAD_SLIP = 0.25
#: Chances that a pass works all steps in columns, all in the head, or each step in a random way.
PASS_KINDS = {"columns": 0.42, "head": 0.40, "mixed": 0.18}
#: Chances of one to four passes over the chain.
PASS_COUNTS = {1: 0.48, 2: 0.37, 3: 0.11, 4: 0.04}
#: Chances of each number of operands: most chains are short, a few are very long.
OPERAND_COUNTS = {2: 22, 3: 30, 4: 22, 5: 11, 6: 6, 7: 3, 8: 2, 9: 1.5, 10: 1, 11: 1, 12: 0.5}
#: Maximum length of a demonstration, in characters. Longer demonstrations are drawn again, because
#: they would not fit into the limit of a response.
MAX_CHARACTERS = 2080
#: Chance that a sentence keeps the wording that the response used before.
KEEP_WORDING = 0.93

_TASKS = {
    "total": "the total of {x}",
    "modular_total": "the total modulo {m} of {x}",
    "modular_product": "the product modulo {m} of {x}",
    "sum_of_products": "the total of the products {x}",
}
_QUESTIONS = ("Find {q}.", "Work out {q}.", "What is {q}?", "Give me {q}.")
_ASK_FOR_BOX = " Put the answer in \\boxed{}."

_WORDING: dict[str, tuple[str, ...]] = {
    "opening": ("Okay, ", "Let me see, ", "So, ", "Right, ", "Well, "),
    "task": ("the task is {q}, ", "we need {q}, ", "they want {q}, "),
    "columns": ("column by column.", "digit by digit.", "with care, in columns."),
    "head": ("in my head.", "quickly.", "at a glance."),
    "mixed": ("step by step.", "one after the other.", "from left to right."),
    "start": ("Start with {a}={x}.", "We have {a}={x}.", "{a} is {x}."),
    "step": (
        "Now {a}, that is to work out {e}",
        "Then comes {a}, so we need {e}",
        "Next in the list is {a}: {e}",
        "Take {a} as well, which means {e}",
    ),
    "result": (
        ". So we have {e}={r}.",
        ", and together that gives {e}={r}.",
        ", which makes {e}={r} in all.",
        ". Read from the top: {e}={r}.",
    ),
    "keep": (
        " Only the rest modulo {m} counts, {r}.",
        " Modulo {m} that is {r}.",
        " Taken modulo {m} this leaves {r}.",
    ),
    "running": (
        " Added to the {x} from before, {e}",
        " With the {x} we had so far, {e}",
        " On top of {x} that is {e}",
    ),
    "again": (
        "Let me check, ",
        "Wait, once more, ",
        "I want to be sure, again ",
        "Let me go over it again, ",
    ),
    "agrees": ("Again {r}, as before.", "The same, {r}.", "It agrees: {r}."),
    "differs": ("Now {r}, not {p}. I keep {r}.", "Before I had {p}, but {r} it is."),
    "closing": (
        "The answer is \\boxed{{{r}}}.",
        "So the result is \\boxed{{{r}}}.",
        "Answer: \\boxed{{{r}}}",
    ),
}


@dataclass(frozen=True)
class Problem:
    """One verifiable problem.

    ``operands`` are in the order of their labels. An operand is a tuple of one signed number or,
    for ``sum_of_products``, of a factor with one digit and a factor with two digits. ``modulus`` is
    0 for families without a modulus. ``answer`` is the right result as decimal text.
    """

    family: str
    operands: tuple[tuple[int, ...], ...]
    modulus: int
    question: str
    task: str
    answer: str

    @property
    def chat(self) -> list[dict[str, str]]:
        return [{"role": "user", "content": self.question}]

    @property
    def details(self) -> dict[str, Any]:
        return {"family": self.family, "operands": len(self.operands)}


@dataclass(frozen=True)
class Demonstration:
    text: str
    answer: str


def _draw(rng: random.Random, chances: dict) -> object:
    return rng.choices(list(chances), weights=list(chances.values()))[0]


def _draw_operands(rng: random.Random, family: str, count: int) -> list[tuple[int, ...]]:
    if family == "modular_product":
        factors = [(rng.randint(2, 9),) for _ in range(count - 1)]
        return [(rng.randint(11, 99),), *factors]
    if family == "sum_of_products":
        return [(rng.randint(2, 9), rng.randint(11, 99)) for _ in range(min(count, 5))]
    # Long chains have mostly two-digit numbers, which keeps the prompt below a hundred tokens.
    long_numbers = 0.35 if count <= 6 else 0.15
    total, operands = 0, []
    for index in range(count):
        size = rng.randint(100, 999) if rng.random() < long_numbers else rng.randint(11, 99)
        negative = family == "total" and index > 0 and size <= total and rng.random() < 0.65
        operands.append((-size if negative else size,))
        total += operands[-1][0]
    return operands


def draw_problem(rng: random.Random, operand_count: int | None = None) -> Problem:
    """Draw one problem.

    ``operand_count`` is the number of operands, 2 to 12; if it is None, the number is drawn, too.
    Sums of products have at most five operands.
    """
    family = rng.choice(FAMILIES)
    count = operand_count or _draw(rng, OPERAND_COUNTS)
    operands = tuple(_draw_operands(rng, family, count))
    modulus = {"modular_total": rng.choice((100, 1000)), "modular_product": 100}.get(family, 0)
    texts = ["*".join(map(str, factors)) for factors in operands]
    if family == "total":
        texts = [f"{x:+d}" for (x,) in operands]
    listed = ",".join(f"{label}={text}" for label, text in zip(LABELS, texts, strict=False))
    task = _TASKS[family].format(x=listed, m=modulus)
    question = rng.choice(_QUESTIONS).format(q=task) + _ASK_FOR_BOX
    values = [math.prod(factors) for factors in operands]
    result = math.prod(values) if family == "modular_product" else sum(values)
    answer = str(result % modulus if modulus else result)
    return Problem(family, operands, modulus, question, task, answer)


def draw_problems(seed: int, count: int, exclude: Sequence[str] = ()) -> list[Problem]:
    """Draw different problems; ``count`` is their number. No question in ``exclude`` is drawn."""
    rng, seen, problems = random.Random(seed), set(exclude), []
    while len(problems) < count:
        problem = draw_problem(rng)
        if problem.question not in seen:
            seen.add(problem.question)
            problems.append(problem)
    return problems


def prompts_of(problems: Iterable[Any], tokenizer: Any) -> list[list[int]]:
    """Return each problem's ``chat`` as token ids; ``tokenizer`` comes from transformers."""
    return [
        tokenizer.apply_chat_template(problem.chat, add_generation_prompt=True)["input_ids"]
        for problem in problems
    ]


def draw_split(split: str) -> list[Problem]:
    """Return the problems of the ``train`` or ``test`` split; the splits are disjoint."""
    test = draw_problems(SPLIT_SEEDS["test"], SPLIT_SIZES["test"])
    if split == "test":
        return test
    used = [problem.question for problem in test]
    return draw_problems(SPLIT_SEEDS[split], SPLIT_SIZES[split], used)


@dataclass
class _Writer:
    rng: random.Random
    column_slip: float
    head_slip: float
    label: str = ""
    wording: dict[str, str] = field(default_factory=dict)

    def say(self, what: str, **values: object) -> str:
        """Return a sentence of the kind ``what``, preferably in the wording used before."""
        here = f"{what} {values.get('a', self.label)}"
        wording = self.wording.get(here) or self.wording.get(what)
        if wording is None or self.rng.random() > KEEP_WORDING:
            wording = self.rng.choice(_WORDING[what])
        self.wording[what] = self.wording[here] = wording
        return wording.format(**values)

    def slip(self, result: int, chance: float) -> int:
        """Return ``result``; with probability ``chance``, one of its digits is wrong."""
        if self.rng.random() >= chance:
            return result
        place = 10 ** self.rng.randrange(len(str(result)))
        wrong = result + self.rng.choice((-2, -1, 1, 2)) * place
        return wrong if wrong >= 0 else result + place

    def work(self, expression: str, columns: str, result: int, careful: bool) -> tuple[str, int]:
        """Write one operation; return its text and the stated result, right or wrong."""
        written = self.slip(result, self.column_slip if careful else self.head_slip)
        if not careful:
            return f"{expression}={written}.", written
        return f"{expression}. {columns}" + self.say("result", e=expression, r=written), written


def _digits(number: int, width: int = 0) -> list[int]:
    return [int(digit) for digit in reversed(str(number).zfill(width))]


def _add_columns(x: int, y: int) -> str:
    width, carry, parts = max(len(str(x)), len(str(y))), 0, []
    for place, p, q in zip(PLACES, _digits(x, width), _digits(y, width), strict=False):
        term = f"{p} and then the {q}" + (" and then the 1" if carry else "")
        parts.append(f"the {place} {term} make it a {p + q + carry}")
        carry = (p + q + carry) // 10
    return ", ".join(parts)


def _subtract_columns(x: int, y: int) -> str:
    width, borrow, parts = len(str(x)), 0, []
    for place, p, q in zip(PLACES, _digits(x, width), _digits(y, width), strict=False):
        term = f"less the {q}" + (" less the 1" if borrow else "")
        needed = q + borrow
        borrow = int(p < needed)
        parts.append(f"the {place} {p + 10 * borrow} {term} make it a {p + 10 * borrow - needed}")
    return ", ".join(parts)


def _multiply_columns(x: int, y: int) -> str:
    carry, parts = 0, []
    for place, p in zip(PLACES, _digits(y), strict=False):
        term = f"{x} times a {p}" + (f" is {x * p} and then the {carry}" if carry else "")
        parts.append(f"the {place} {term} make it a {x * p + carry}")
        carry = (x * p + carry) // 10
    return ", ".join(parts)


class _NegativeTotal(Exception):
    """A wrong result has led to a negative total; the demonstration is drawn again."""


def _accumulate(writer: _Writer, total: int, value: int, careful: bool) -> tuple[str, int]:
    if value >= 0:
        columns = _add_columns(total, value)
        return writer.work(f"{total}+{value}", columns, total + value, careful)
    if total + value < 0:
        raise _NegativeTotal
    columns = _subtract_columns(total, -value)
    return writer.work(f"{total}-{-value}", columns, total + value, careful)


def _product_step(writer: _Writer, factors: tuple[int, ...], careful: bool) -> tuple[str, int]:
    x, y = factors
    return writer.work(f"{x}*{y}", _multiply_columns(x, y), x * y, careful)


def _step(
    writer: _Writer, problem: Problem, label: str, total: int, index: int, careful: bool
) -> tuple[str, int]:
    factors = problem.operands[index]
    writer.label = label
    if problem.family == "sum_of_products":
        product_text, product = _product_step(writer, factors, careful)
        text, new_total = _accumulate(writer, total, product, careful)
        whole = writer.say("step", a=label, e=product_text)
        return whole + writer.say("running", x=total, e=text), new_total
    if problem.family == "modular_product":
        factor = factors[0]
        columns = _multiply_columns(factor, total)
        text, result = writer.work(f"{factor}*{total}", columns, factor * total, careful)
    else:
        text, result = _accumulate(writer, total, factors[0], careful)
    rest, modulus = "", problem.modulus
    if modulus and result >= modulus:
        result %= modulus
        rest = writer.say("keep", r=result, m=modulus)
    return writer.say("step", a=label, e=text) + rest, result


def _pass(writer: _Writer, problem: Problem, kind: str) -> tuple[str, int]:
    def careful() -> bool:
        return kind == "columns" or (kind == "mixed" and writer.rng.random() < 0.5)

    first = problem.operands[0]
    writer.label = LABELS[0]
    if len(first) == 1:
        total = first[0]
        lines = [writer.say("start", a=LABELS[0], x=total)]
    else:
        text, total = _product_step(writer, first, careful())
        lines = [writer.say("step", a=LABELS[0], e=text)]
    for index in range(1, len(problem.operands)):
        text, total = _step(writer, problem, LABELS[index], total, index, careful())
        lines.append(text)
    return "\n".join(lines), total


def _write(problem: Problem, writer: _Writer, kinds: Sequence[str]) -> tuple[str, int]:
    paragraphs, previous = [], None
    for kind in kinds:
        opening = writer.say("opening" if previous is None else "again")
        opening += writer.say("task", q=problem.task) + writer.say(kind)
        text, result = _pass(writer, problem, kind)
        paragraphs.append(opening + "\n" + text)
        if previous is not None:
            verdict = "agrees" if result == previous else "differs"
            paragraphs.append(writer.say(verdict, r=result, p=previous))
        previous = result
    closing = writer.say("closing", r=previous)
    return "<think>\n" + "\n".join(paragraphs) + "\n</think>\n\n" + closing, previous


def demonstrate(
    problem: Problem,
    rng: random.Random,
    kinds: Sequence[str] | None = None,
    column_slip: float = COLUMN_SLIP,
    head_slip: float = HEAD_SLIP,
) -> Demonstration:
    """Write a response to ``problem`` (without the end-of-turn token).

    ``kinds`` has the kind of every pass (``columns``, ``head``, ``mixed``). If it is None, the
    number of passes and their kinds are drawn. Raises ``ValueError`` if no response of at most
    ``MAX_CHARACTERS`` is found.
    """
    for _ in range(200):
        chosen = kinds or rng.choices(
            list(PASS_KINDS), list(PASS_KINDS.values()), k=_draw(rng, PASS_COUNTS)
        )
        try:
            text, result = _write(problem, _Writer(rng, column_slip, head_slip), chosen)
        except _NegativeTotal:
            continue
        if len(text) <= MAX_CHARACTERS:
            return Demonstration(text, str(result))
    raise ValueError(f"no demonstration of at most {MAX_CHARACTERS} characters: {problem}")
