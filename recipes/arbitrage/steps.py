"""Step-level speculation: a draft model writes a step, the target rewrites it where that pays.

The method is Arbitrage (Berkeley, Apple, ICSI, LBNL, 2025). Speculative decoding keeps the target's
distribution. This does not: the draft model's steps stay wherever the mode is content with them.

All answers take their steps together: the draft model writes one for each, the mode judges them,
the target rewrites some. Prefix caches of the engines keep what was read before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sam_rollout.identity import RequestIdentity

DRAFT, TARGET = "draft", "target"
MODES = (DRAFT, TARGET, "rsd", "router", "oracle")


@dataclass(frozen=True)
class Step:
    """A step as token ids and text, its delimiter included; ``last`` if the answer ends with it."""

    tokens: tuple[int, ...]
    text: str
    author: str
    last: bool


@dataclass
class Solution:
    """An answer that grows: question, token ids before the answer, who it is, and its steps."""

    question: str
    prompt: list[int]
    identity: RequestIdentity
    steps: list[Step] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """Token ids of the answer so far."""
        return [token for step in self.steps for token in step.tokens]

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(step.text for step in self.steps)


class Author(Protocol):
    """A model that writes steps."""

    def write(self, solutions: Sequence[Solution], sample: int = 0) -> list[Step]:
        """Write the next step of each solution; ``sample`` numbers independent tries."""


# Solutions and a next step for each -> a number for each, float [solutions].
Scores = Callable[[Sequence[Solution], Sequence[Step]], np.ndarray]
# The same -> the step that each solution goes on with.
Choice = Callable[[Sequence[Solution], Sequence[Step]], Sequence[Step]]


def solve(
    solutions: Sequence[Solution],
    author: Author,
    choose: Choice = lambda solutions, steps: steps,
    progress: Callable[[int], object] = lambda ended: None,
) -> None:
    """Write all answers to their ends.

    Args:
        solutions: Answers without steps; they are filled in.
        author: Who writes every step first.
        choose: What is made of it; by default it stays.
        progress: Called after every round with the number of answers that ended in it.
    """
    unfinished = list(solutions)
    while unfinished:
        steps = choose(unfinished, author.write(unfinished))
        for solution, step in zip(unfinished, steps, strict=True):
            solution.steps.append(step)
        left = [solution for solution in unfinished if not solution.steps[-1].last]
        progress(len(unfinished) - len(left))
        unfinished = left


def choice_of(mode: str, tau: float, target: Author, judges: dict[str, Scores]) -> Choice:
    """How a mode chooses between the draft model's step and the target's.

    Args:
        mode: ``rsd`` rewrites steps whose process reward is below ``tau``, ``router`` those that
            the target is said to improve with a chance above ``tau``. ``oracle`` has both models
            write, and takes the target's step where its reward is higher by more than ``tau``.
        tau: The threshold.
        target: The large model.
        judges: ``reward``, process rewards in 0..1, and ``router``, chances.

    Raises:
        ValueError: The mode is unknown.
    """
    if mode == "rsd":
        return _rewrite(lambda *steps: judges["reward"](*steps) < tau, target)
    if mode == "router":
        return _rewrite(lambda *steps: judges["router"](*steps) > tau, target)
    if mode != "oracle":
        raise ValueError(f"mode {mode!r}: must be one of {', '.join(MODES)}")

    def better(solutions: Sequence[Solution], steps: Sequence[Step]) -> Sequence[Step]:
        written = target.write(solutions)
        gains = judges["reward"](solutions, written) - judges["reward"](solutions, steps)
        return [pair[int(gain > tau)] for *pair, gain in zip(steps, written, gains, strict=True)]

    return better


def _rewrite(doubts: Scores, target: Author) -> Choice:
    """Has the target write the steps for which ``doubts`` is true."""

    def choose(solutions: Sequence[Solution], steps: Sequence[Step]) -> Sequence[Step]:
        rows = np.flatnonzero(doubts(solutions, steps))
        chosen = list(steps)
        written = target.write([solutions[row] for row in rows]) if len(rows) else []
        for row, step in zip(rows, written, strict=True):
            chosen[row] = step
        return chosen

    return choose
