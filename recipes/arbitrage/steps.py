"""Step-level speculation: a draft model writes each step, and the target rewrites some of them.

A step is a part of an answer, such as a paragraph. The method is Arbitrage (Berkeley, Apple, ICSI,
LBNL, 2025). Unlike speculative decoding, Arbitrage changes the target's distribution, because
accepted steps of the draft model stay in the answer. Each answer is a coroutine, and a model serves
all waiting answers together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from sam_rollout.core.identity import RequestIdentity

DRAFT, TARGET = "draft", "target"
# Largest number of answers that are written at once: their texts must fit into the prefix caches.
MOST_AT_ONCE = 256
MODES = (DRAFT, TARGET, "rsd", "router", "oracle")


@dataclass(frozen=True)
class Step:
    """A step, with its delimiter; ``last`` says whether the answer ends with this step."""

    tokens: tuple[int, ...]
    text: str
    author: str
    last: bool


@dataclass
class Solution:
    """A problem, and the answer that is being written."""

    question: str
    prompt: list[int]  # token ids before the answer
    identity: RequestIdentity
    source: str = ""  # the problem's data source
    truth: str = ""  # the right answer
    steps: list[Step] = field(default_factory=list)

    def begun(self) -> Solution:
        return replace(self, steps=[])

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)


class Author(Protocol):
    """A model that writes steps."""

    def work(self) -> None:
        """Serve the waiting requests, if there are any."""

    async def write(self, solution: Solution, sample: int = 0) -> Step:
        """Write a solution's next step; each value of ``sample`` gives an independent step."""


# (a solution, a possible next step) -> the score of the step.
Score = Callable[[Solution, Step], Awaitable[float]]
# (a solution, a possible next step) -> the step that the solution continues with.
Choice = Callable[[Solution, Step], Awaitable[Step]]


def solve(
    solutions: Sequence[Solution],
    author: Author,
    choose: Choice | None = None,
    servers: Sequence[object] = (),
    progress: Callable[[], object] = lambda: None,
) -> None:
    """Write all answers until they end.

    Args:
        solutions: Answers without steps; the steps are added to them.
        author: The model that writes the first version of every step.
        choose: Chooses the final version of a step; by default the author's step is taken.
        servers: The other models that `choose` asks. A model without ``work`` answers at once.
        progress: Called whenever an answer ends.
    """

    async def answer(solution: Solution, room: asyncio.Semaphore) -> None:
        async with room:
            while not solution.steps or not solution.steps[-1].last:
                step = await author.write(solution)
                solution.steps.append(await choose(solution, step) if choose else step)
        progress()

    working = [server for server in (author, *servers) if hasattr(server, "work")]

    async def serve() -> None:
        room = asyncio.Semaphore(MOST_AT_ONCE)
        answers = asyncio.gather(*(answer(solution, room) for solution in solutions))
        while not answers.done():
            await asyncio.sleep(0)  # lets every answer run until it waits
            for server in working:
                server.work()
        await answers

    asyncio.run(serve())


def choice_of(mode: str, tau: float, target: Author, judges: dict[str, Score]) -> Choice:
    """Return the function that chooses, in a mode, between the draft model's and the target's step.

    Args:
        mode: With ``rsd``, the target rewrites a step if the step's process reward is below
            ``tau``. With ``router``, the target rewrites a step if the router predicts, with a
            probability above ``tau``, that the target's step would be better. With ``oracle``, both
            models write each step, and the target's step is taken if its reward is higher by more
            than ``tau``.
        judges: ``reward`` returns process rewards, and ``router`` returns probabilities; both are
            in 0..1.

    Raises:
        ValueError: The mode is unknown.
    """

    async def rewrite(solution: Solution, step: Step) -> Step:
        score = await judges["reward" if mode == "rsd" else mode](solution, step)
        doubtful = score < tau if mode == "rsd" else score > tau
        return await target.write(solution) if doubtful else step

    async def oracle(solution: Solution, step: Step) -> Step:
        written = await target.write(solution)
        gain = await judges["reward"](solution, written) - await judges["reward"](solution, step)
        return written if gain > tau else step

    choices = {"rsd": rewrite, "router": rewrite, "oracle": oracle}
    if mode not in choices:
        raise ValueError(f"mode {mode!r}: must be one of {', '.join(MODES)}")
    return choices[mode]
