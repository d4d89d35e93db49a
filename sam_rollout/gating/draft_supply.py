"""What drafts would bring by the least chance asked of their tokens, learned from what was offered.

The drafter tells of every step in which it looked for drafts how many tokens it could have drafted,
by their chance to be accepted (`verified.Offered`), and what became of those that the text judged.
A least chance takes those above it. How many of them are accepted is what was seen of their class;
where little was seen, what the drafter expected.

How many tokens are offered depends on how far the text moves on from step to step, and so on what
is taken. What is known about a least chance is exact only while it is in use.

Requests that are left in the long tail are no fair sample of all: every octave of running requests
has offers of its own. How well the drafter's chances hold is learned of all together.
"""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from sam_rollout.core.verified import CHANCES, Offered

LEVELS = len(CHANCES) + 1  # level 0 takes nothing, level n what has a chance of CHANCES[n - 1]
_ROWS = 256  # requests that are remembered, one counted in every step in which it was looked for
_STEPS = 16  # steps that are remembered, if these have more requests
_JUDGED = 2048  # draft tokens of a class that are remembered
_BELIEVED = 16.0  # draft tokens that the drafter's own chances count as
_LOOKED_AT = 32  # those that a closed gate's looks are remembered by
# What looks contradict is forgotten: these standard deviations and tokens more are right.
_DEVIATIONS, _MORE = 4.0, 2.0


class Calibration:
    """How many of a class of draft tokens are right.

    Attributes:
        steps: that it has learned from.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._judged = np.zeros((3, len(CHANCES)))  # tokens, right ones, those expected to be right
        self._looks = np.zeros_like(self._judged)  # the same of a closed gate's looks
        self._usual = [(a + b) / 2 for a, b in zip(CHANCES, (1.0, *CHANCES[:-1]), strict=True)]

    def observe(self, offered: Offered) -> None:
        """Learn from a step."""
        self.steps += 1
        self._judged += offered.tokens[1:]
        if max(self._judged[0].tolist()) > _JUDGED:
            self._judged[:, self._judged[0] > _JUDGED] /= 2

    def look(self, offered: Offered) -> None:
        """Doubt what was learned before, after a look of a closed gate that `observe` has seen.

        Looks are rare. What was learned while drafts were wrong would outweigh them for long.
        """
        self._looks += offered.tokens[1:]
        judged, right, _ = self._looks
        expected = np.array(self.shares())
        off = _DEVIATIONS * np.sqrt(judged * expected * (1 - expected)) + _MORE
        better = right > judged * expected + off
        self._judged[:, better] = self._looks[:, better]
        self._looks[:, better | (judged > _LOOKED_AT)] /= 2

    def shares(self) -> list[float]:
        """Share of right tokens by class."""
        sums = zip(*self._judged.tolist(), self._usual, strict=True)
        return [
            (right + _BELIEVED * (expected + usual) / (judged + 1)) / (judged + _BELIEVED)
            for judged, right, expected, usual in sums
        ]


class Levels(NamedTuple):
    """What each level takes of a request, per step."""

    offered: list[float]  # draft tokens
    accepted: list[float]  # that are expected to be
    spread: list[float]  # standard deviation of offered; for n requests it is that / sqrt(n)


class Supply:
    """What is offered to a request in a step, for one octave of running requests.

    Attributes:
        rows: requests that it is known from, the latest ones.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        # These are lists, not arrays: with cold caches a short loop takes less time than a dozen
        # calls of numpy.
        self._tokens = [0.0] * len(CHANCES)  # by class
        self._spread = [0.0] * len(CHANCES)  # by level: variance of a step's tokens / requests
        self.rows = 0.0
        self._levels = Levels([], [], [])
        self._worked_out_at = -1  # steps of the calibration

    def observe(self, offered: Offered) -> None:
        """Learn from a step."""
        if not offered.rows:
            return
        rows = offered.rows
        self.rows = min(self.rows + rows, max(_ROWS, _STEPS * rows))
        weight = rows / self.rows
        tokens, spread, total = self._tokens, self._spread, 0.0
        for i, told in enumerate(offered.tokens[0].tolist()):
            off = told / rows - tokens[i]
            tokens[i] += weight * off
            total += off
            spread[i] += weight * ((1 - weight) * rows * total * total - spread[i])

    def heir(self) -> Supply:
        """Another one that begins with what is known here, and soon changes its mind."""
        heir = Supply(self._calibration)
        heir._tokens, heir._spread = self._tokens.copy(), self._spread.copy()
        heir.rows = min(self.rows, _ROWS / 4)
        return heir

    def by_level(self) -> Levels:
        """What a request that may draft would verify and gain."""
        if self._worked_out_at != self._calibration.steps:
            self._worked_out_at = self._calibration.steps
            accepted = map(mul, self._tokens, self._calibration.shares())
            self._levels = Levels(
                list(accumulate(self._tokens, initial=0.0)),
                list(accumulate(accepted, initial=0.0)),
                [0.0, *map(math.sqrt, self._spread)],
            )
        return self._levels
