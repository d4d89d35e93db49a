"""Rewards each step of a response to the synthetic task for the true claims in the step's lines.

This program replaces a process reward model on a laptop. A line is judged as if the results of
earlier lines were right, so a wrong result lowers only the reward of its own line.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from recipes.dapo_qwen3.synthetic_math import LABELS

_OPERANDS = re.compile(r"\b([a-l])=([-+]?\d+)(?:\*(\d+))?")
_MODULUS = re.compile(r"modulo (\d+) of")
_CLAIM = re.compile(r"(\d+)([-+*])(\d+)=(\d+)")
# Matches a line that names its operand: "Start with a=31.", "a is 31.", "Then comes b, so".
_LABEL = re.compile(r"(?:^|[ ])([a-l])(?:=\d|,| is \d|:| as well)")
_BOXED = re.compile(r"\\boxed\{(\d+)\}")
_RESULTS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass
class Chain:
    """A problem, parsed from its question, and the progress of a response to the problem."""

    listed: str
    operands: list[tuple[int, ...]]
    modulus: int
    is_product: bool
    # The latest intermediate result of the current pass, right or wrong, read from the response.
    result: int | None = None
    previous: int | None = None  # The result of the previous pass.
    done: int = 0  # Number of operands that the current pass has used.

    @classmethod
    def of(cls, question: str) -> Chain:
        """Read a question of the synthetic task; raise ``ValueError`` for other questions."""
        found = list(_OPERANDS.finditer(question))
        if [one[1] for one in found] != list(LABELS[: len(found)]) or not found:
            raise ValueError(f"not a question of the synthetic task: {question[:80]!r}")
        modulus = _MODULUS.search(question)
        return cls(
            listed=",".join(one[0] for one in found),
            operands=[tuple(int(x) for x in one.group(2, 3) if x) for one in found],
            modulus=int(modulus[1]) if modulus else 0,
            is_product="the product modulo" in question,
        )

    def read(self, line: str) -> float:
        """Read the next line, and return the share of its claims that are true, in 0..1."""
        claims = self._claims(line)
        return sum(claims) / len(claims) if claims else 0.0

    def _claims(self, line: str) -> list[bool]:
        numbers = [int(number) for number in re.findall(r"\d+", line)]
        whole = self.done == len(self.operands)
        if line.strip() in ("", "<think>"):
            return [True]
        if line.strip() == "</think>":
            return [whole]
        if boxed := _BOXED.search(line):
            return [whole, int(boxed[1]) == self.result]
        if " the total" in line or " the product" in line:  # a pass begins
            begins = whole or self.done == 0
            self.previous, self.result, self.done = self.result, None, 0
            lists = re.search(re.escape(self.listed) + r", \D*$", line) is not None
            return [begins, lists]
        if label := _LABEL.search(line):
            return self._step(label[1], line, numbers)
        if numbers and self.previous is not None:  # this line compares two passes
            same = self.result == self.previous
            compares = "not" in line or "Before" in line
            return [whole, set(numbers) == {self.result, self.previous}, compares != same]
        return [False]

    def _step(self, label: str, line: str, numbers: list[int]) -> list[bool]:
        number = LABELS.index(label)
        if number != self.done or number >= len(self.operands) or not numbers:
            return [False]
        stated = [(int(x), sign, int(y), int(r)) for x, sign, y, r in _CLAIM.findall(line)]
        expected, value = self._expected(self.operands[number], stated)
        claims = [_RESULTS[sign](x, y) == result for x, sign, y, result in stated]
        claims.append([one[:3] for one in stated] == expected)
        if not expected:
            claims = [numbers[-1] == value]
        elif stated:
            # The last number of a line is its result, modulo the problem's modulus if necessary.
            result, kept = stated[-1][3], numbers[-1]
            due = bool(self.modulus) and result >= self.modulus
            if due or kept != result:
                claims.append(due and kept == result % self.modulus)
        self.result, self.done = numbers[-1], number + 1
        return claims

    def _expected(
        self, factors: tuple[int, ...], stated: Sequence[tuple[int, str, int, int]]
    ) -> tuple[list[tuple[int, str, int]], int]:
        """Return an operand's operations and its value; the first operand may have no operation."""
        before, value = self.result, factors[0]
        if len(factors) == 2:
            operations = [(factors[0], "*", factors[1])]
            if before is not None and stated:
                operations.append((before, "+", stated[0][3]))
            return operations, value
        if before is None:
            return [], value
        if self.is_product:
            return [(value, "*", before)], value
        return [(before, "+" if value >= 0 else "-", abs(value))], value


def check_step(question: str, before: str, step: str) -> float:
    """Return a step's process reward: the share of true claims in the step's worst line.

    ``before`` is the response up to the step. Raises ``ValueError`` for a ``question`` that does
    not come from ``synthetic_math``.
    """
    chain = Chain.of(question)
    for line in before.splitlines():
        chain.read(line)
    return min((chain.read(line) for line in step.splitlines()), default=0.0)
