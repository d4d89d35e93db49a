"""How many draft tokens a budget brings, learned from what was verified.

A drafter is right for a while, then wrong: runs of L tokens. A budget of k gets k + 1 of them a
step (the bonus token, too, is one the drafter was right about), so that a run takes
1 + L // (k + 1) steps and yields L + 1 tokens. What a step yields is the ratio of the means.
Chances by position in the draft would not do: a small budget cuts a long run into many steps, all
of them successful, and would promise a larger one more than it can keep.

Counted are the requests that reached the j-th token of a run, and those that had it accepted, too.
A request without a draft, or with one too short, counts as one that did not. The product of these
shares is the chance that a run is so long (the product-limit estimate of Kaplan and Meier, 1958);
steps with a small budget tell about its first positions only, and bias none. After a step whose
whole budget was accepted the run may go on: positions there are counted together, as what comes
after those that were counted one by one. Nobody sees whether the drafter was right about the bonus
token in between, which is why their first ones are counted apart: see `_expect`.

Requests that are left in the long tail are no fair sample of all: every octave of running requests
has counts of its own.
"""

from __future__ import annotations

import copy
import math

import numpy as np

_ROWS = 256  # requests that are remembered, one counted in every step it drafts in
_STEPS = 16  # or so many steps, if these have more requests
_IDLE_STEPS = 64  # what is known about a position fades so fast while nothing is drafted there,
_KEPT_ROWS = 8.0  # but not below this: forgetting must not bring hope back
_VAGUE = 2.0
_INHERITED_ROWS = 64.0
# Where little was counted: a draft token is as good as lost, and later ones follow their first.
_ASSUMED = 2.0
_ASSUMED_FIRST, _ASSUMED_NEXT = 0.2, 0.8
_LONGEST = 48  # tokens of a run that are reckoned one by one
_SUREST = 0.99  # chance of another token after these


class Acceptance:
    """Expected tokens of a request's step by budget.

    Args:
        max_draft_tokens: largest budget.

    Attributes:
        fill: draft tokens that a request really had, for each one it was allowed.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._reached = [0.0] * max_draft_tokens
        self._kept = [0.0] * max_draft_tokens
        # In steps after a fully accepted budget: the first position, and all others.
        self._reached_next = self._kept_next = 0.0
        self._reached_later = self._kept_later = 0.0
        self._drafted = self._allowed = 0.0
        self._gains: list[float] | None = None
        self.fill = 1.0

    def observe(
        self, budget: int, drafted: np.ndarray, gained: np.ndarray, going_on: np.ndarray
    ) -> None:
        """Learn from a step in which each request was allowed `budget` >= 1 tokens.

        Args:
            budget: that of the step.
            drafted: int[B], draft tokens verified.
            gained: int[B], those accepted and the bonus token; 0 for requests that tell nothing.
            going_on: bool[B], the step before accepted the whole budget.
        """
        width = budget + 2
        counts = np.bincount(gained + width * going_on, minlength=2 * width).tolist()
        fresh, later = counts[:width], counts[width:]
        rows = len(gained) - fresh[0] - later[0]
        if not rows:
            return
        keep = 1 - 1 / max(_STEPS, _ROWS / rows)
        self._drafted = keep * self._drafted + float(drafted.sum())
        self._allowed = keep * self._allowed + rows * budget
        self.fill = self._drafted / self._allowed
        kept = sum(fresh) - fresh[0]
        for j in range(budget):
            reached, kept = kept, kept - fresh[j + 1]
            self._reached[j] = keep * self._reached[j] + reached
            self._kept[j] = keep * self._kept[j] + kept
        reached = sum(later) - later[0]
        kept = reached - later[1]
        self._reached_next = keep * self._reached_next + reached
        self._kept_next = keep * self._kept_next + kept
        self._reached_later *= keep
        self._kept_later *= keep
        for j in range(1, budget):
            self._reached_later += kept
            kept -= later[j + 1]
            self._kept_later += kept
        self._fade(1 - 1 / _IDLE_STEPS, budget)

    @property
    def gains(self) -> list[float]:
        """Expected accepted tokens of a request, by budget 0..k."""
        if self._gains is None:
            self._gains = self._expect()
        return self._gains

    def fade(self, steps: int) -> None:
        """Trust what was learned less, after so many steps without drafts."""
        self._fade(max(0.0, 1 - steps / _IDLE_STEPS), 0)

    def heir(self) -> Acceptance:
        """Another one that begins with what is known here, and is quicker to change its mind."""
        heir = copy.deepcopy(self)
        heir._fade(0.0, 0, _INHERITED_ROWS)
        return heir

    def is_vague(self, budget: int) -> bool:
        """Whether little is known (any more) about the last token of a budget."""
        return self._reached[budget - 1] <= _VAGUE * _KEPT_ROWS

    def _fade(self, keep: float, first: int, least: float = _KEPT_ROWS) -> None:
        for j in range(first, len(self._reached)):
            reached = self._reached[j]
            if reached > least:
                share = max(keep, least / reached)
                self._reached[j] *= share
                self._kept[j] *= share
        later = self._reached_next + self._reached_later
        if not first and later > least:
            share = max(keep, least / later)
            self._reached_next *= share
            self._kept_next *= share
            self._reached_later *= share
            self._kept_later *= share
        self._gains = None

    def _expect(self) -> list[float]:
        first = _share(self._kept[0], self._reached[0], _ASSUMED_FIRST)
        # The run went on over the bonus token with the chance q of any later token, and had the
        # next one accepted with q; or it ended there, and a new one began. That makes
        # q * q + (1 - q) * first, which is seen.
        excess = max(_share(self._kept_next, self._reached_next, first) - first, 0.0)
        q = (first + math.sqrt(first * first + 4 * excess)) / 2
        kept = self._kept_later + q * self._reached_next
        reached = self._reached_later + self._reached_next
        later = min(_share(kept, reached, _ASSUMED_NEXT), _SUREST)
        chance, chances = 1.0, [1.0]  # that a run has at least so many tokens
        assumed = _ASSUMED_FIRST
        for kept, reached in zip(self._kept, self._reached, strict=True):
            chance *= _share(kept, reached, assumed)
            chances.append(chance)
            assumed = later
        for _ in range(_LONGEST - len(self._kept)):
            chance *= later
            chances.append(chance)
        rest = chance * later / (1 - later)  # tokens beyond
        tokens = sum(chances) + rest
        return [
            tokens / (1 + sum(chances[size::size]) + rest / size) - 1
            for size in range(1, len(self._kept) + 2)
        ]


def _share(kept: float, reached: float, assumed: float) -> float:
    return (kept + _ASSUMED * assumed) / (reached + _ASSUMED)
