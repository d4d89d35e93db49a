"""Learns from past steps how many draft tokens reach a minimum chance, and how many are right.

After each step the drafter reports which tokens it could have drafted (the offers). It also reports
which of these tokens are judged: known to be right or wrong, because the text went on. Tokens are
counted in classes by their chance of acceptance, as the drafter estimated it. The fewer judged
tokens a class has, the more the drafter's estimate weighs.

Each octave of the number of running requests (1, 2 to 3, 4 to 7, ...) has its own offers, because
the few requests in a long tail are not typical of all requests.
"""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np

from sam_rollout.core.verified import CHANCES, Offered

LEVELS = len(CHANCES) + 1  # level 0: no draft; level n: tokens with chance >= CHANCES[n - 1]
# The average of offers covers about _ROWS requests (a request counts once per step), or _STEPS
# steps if these have more requests.
_ROWS = 256
_STEPS = 16
_JUDGED = 2048  # when a class has this number of judged tokens, its counts are halved
_BELIEVED = 16.0  # the drafter's own estimate weighs like this number of judged tokens
# A look is a step for which drafts are made and counted, but not handed over to the engine, because
# the gate is closed. A class is learned anew if looks find more right tokens than expected. The
# excess has to be larger than _DEVIATIONS standard deviations plus _MORE tokens. When looks have
# more than _LOOKED_AT judged tokens of a class, the looks' counts of this class are halved.
_LOOKED_AT = 32
_DEVIATIONS, _MORE = 4.0, 2.0


class Calibration:
    """Learns the share of right tokens in each class of draft tokens."""

    def __init__(self) -> None:
        self.steps = 0
        # By class: number of judged tokens, number of right tokens, sum of judged tokens' chances.
        self._judged = np.zeros((3, len(CHANCES)))
        self._looks = np.zeros_like(self._judged)  # the same counts for a closed gate's looks
        self._usual = [(a + b) / 2 for a, b in zip(CHANCES, (1.0, *CHANCES[:-1]), strict=True)]

    def observe(self, offered: Offered) -> None:
        """Learn from the draft tokens that were found for a step."""
        self.steps += 1
        self._judged += offered.tokens[1:]
        if max(self._judged[0].tolist()) > _JUDGED:
            self._judged[:, self._judged[0] > _JUDGED] /= 2

    def look(self, offered: Offered) -> None:
        """Learn from a look of a closed gate; called after `observe`.

        If a class of draft tokens has improved, only the counts of looks are kept for this class.
        Otherwise many wrong tokens that were counted earlier would outweigh the looks.
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
    """Numbers of draft tokens per request and step, for each level of the gate `auto`."""

    offered: list[float]
    accepted: list[float]  # expected number of accepted draft tokens
    # Standard deviation of `offered` for one request; for a mean of n requests, divide by sqrt(n).
    spread: list[float]


class Supply:
    """Learns how many tokens are offered per request and step, in one octave."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        # Lists are used, because a short loop is faster than several numpy calls with cold caches.
        self._tokens = [0.0] * len(CHANCES)  # by class: tokens offered per request
        self._spread = [0.0] * len(CHANCES)  # by level: variance of a request's tokens
        self.rows = 0.0  # number of requests from which offers were learned, up to a limit
        self._levels = Levels([], [], [])
        self._worked_out_at = -1  # value of `Calibration.steps` when `_levels` was computed

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
        """Return a supply for another octave; it starts from these offers and adapts fast."""
        heir = Supply(self._calibration)
        heir._tokens, heir._spread = self._tokens.copy(), self._spread.copy()
        heir.rows = min(self.rows, _ROWS / 4)
        return heir

    def by_level(self) -> Levels:
        """Return the numbers of draft tokens of each level, per request that may have drafts."""
        if self._worked_out_at != self._calibration.steps:
            self._worked_out_at = self._calibration.steps
            accepted = map(mul, self._tokens, self._calibration.shares())
            self._levels = Levels(
                list(accumulate(self._tokens, initial=0.0)),
                list(accumulate(accepted, initial=0.0)),
                [0.0, *map(math.sqrt, self._spread)],
            )
        return self._levels
