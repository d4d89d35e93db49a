"""Learns from past steps how many draft tokens reach a minimum chance, and how many are right.

The drafter reports the tokens that it could have drafted (`verified.Offered`), and which of them
the text has shown to be right or wrong (judged). They are counted in classes, by their chance of
acceptance. The fewer tokens a class has, the more the drafter's own estimate counts.

Each octave of the number of running requests (from one power of two to the next) has its own
figures, because requests of the long tail are not typical of all.
"""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from sam_rollout.core.verified import CHANCES, Offered

LEVELS = len(CHANCES) + 1  # level 0: no draft; level n: tokens with chance >= CHANCES[n - 1]
_ROWS = 256  # offers are averaged over about this many requests, which count once per step
_STEPS = 16  # or over this many steps, if these have more requests
_JUDGED = 2048  # when a class has this many judged tokens, its counts are halved
_BELIEVED = 16.0  # the drafter's own estimate counts like this number of judged tokens
_LOOKED_AT = 32  # counts of a closed gate's looks are halved at this many judged tokens
# A look is a step in which a closed gate finds drafts but hands none over. A class is learned anew
# if looks found more right tokens than expected, by _DEVIATIONS standard deviations plus _MORE.
_DEVIATIONS, _MORE = 4.0, 2.0


class Calibration:
    """Learns the share of right tokens in each class of draft tokens, from `steps` steps."""

    def __init__(self) -> None:
        self.steps = 0
        # By class: number of judged tokens, number of right tokens, sum of judged tokens' chances.
        self._judged = np.zeros((3, len(CHANCES)))
        self._looks = np.zeros_like(self._judged)  # the same for a closed gate's looks
        self._usual = [(a + b) / 2 for a, b in zip(CHANCES, (1.0, *CHANCES[:-1]), strict=True)]

    def observe(self, offered: Offered) -> None:
        """Learn from the draft tokens that were found for a step."""
        self.steps += 1
        self._judged += offered.tokens[1:]
        if max(self._judged[0].tolist()) > _JUDGED:
            self._judged[:, self._judged[0] > _JUDGED] /= 2

    def look(self, offered: Offered) -> None:
        """Learn from a step in which a closed gate only counted drafts; called after `observe`.

        A class whose drafts have improved gets the counts of such steps alone. Otherwise, the many
        earlier wrong drafts would outweigh these counts.
        """
        self._looks += offered.tokens[1:]
        judged, right, _ = self._looks
        expected = np.array(self.shares())
        off = _DEVIATIONS * np.sqrt(judged * expected * (1 - expected)) + _MORE
        better = right > judged * expected + off
        self._judged[:, better] = self._looks[:, better]
        self._looks[:, better | (judged > _LOOKED_AT)] /= 2

    def shares(self) -> list[float]:
        """Return the share of right tokens by class."""
        sums = zip(*self._judged.tolist(), self._usual, strict=True)
        return [
            (right + _BELIEVED * (expected + usual) / (judged + 1)) / (judged + _BELIEVED)
            for judged, right, expected, usual in sums
        ]


class Levels(NamedTuple):
    """The draft tokens of each level, per request and step."""

    offered: list[float]  # draft tokens
    accepted: list[float]  # draft tokens that are expected to be accepted
    # Standard deviation of `offered`; a mean of n requests has 1/sqrt(n) of this deviation.
    spread: list[float]


class Supply:
    """Learns the tokens offered per request and step in one octave, from `rows` requests."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        # These are lists, because with cold caches a short loop is faster than several numpy calls.
        self._tokens = [0.0] * len(CHANCES)  # by class: tokens offered per request
        self._spread = [0.0] * len(CHANCES)  # by level: variance of a request's tokens
        self.rows = 0.0
        self._levels = Levels([], [], [])
        self._worked_out_at = -1  # `Calibration.steps` when `_levels` was computed

    def observe(self, offered: Offered) -> None:
        """Learn from the draft tokens that were found for a step."""
        if not offered.rows:
            return
        rows = offered.rows
        self.rows = min(self.rows + rows, max(_ROWS, _STEPS * rows))
        weight = rows / self.rows
        tokens, spread, total = self._tokens, self._spread, 0.0
        for i, count in enumerate(offered.tokens[0].tolist()):
            off = count / rows - tokens[i]
            tokens[i] += weight * off
            total += off
            spread[i] += weight * ((1 - weight) * rows * total * total - spread[i])

    def heir(self) -> Supply:
        """Return a supply for another octave, which begins with these offers and adapts fast."""
        heir = Supply(self._calibration)
        heir._tokens, heir._spread = self._tokens.copy(), self._spread.copy()
        heir.rows = min(self.rows, _ROWS / 4)
        return heir

    def by_level(self) -> Levels:
        """Return the tokens that each level offers to a request that may have drafts."""
        if self._worked_out_at != self._calibration.steps:
            self._worked_out_at = self._calibration.steps
            accepted = map(mul, self._tokens, self._calibration.shares())
            self._levels = Levels(
                list(accumulate(self._tokens, initial=0.0)),
                list(accumulate(accepted, initial=0.0)),
                [0.0, *map(math.sqrt, self._spread)],
            )
        return self._levels
