"""How many draft tokens a budget brings, learned from what was verified.

Counted by position: of the requests that were allowed j tokens and had j - 1 accepted, how many had
the j-th accepted, too. A request without a draft, or with one too short, counts as one that did
not. The product of these shares is the chance of the j-th token (the product-limit estimate of
Kaplan and Meier, 1958); steps with a small budget tell about its first positions only, and bias
none. Requests that are left in the long tail are no fair sample of all: every octave of running
requests has counts of its own.
"""

from __future__ import annotations

import copy

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


class Acceptance:
    """Expected tokens of a request's step by budget.

    Args:
        max_draft_tokens: largest budget.

    Attributes:
        gains: expected accepted tokens of a request, by budget 0..k.
        fill: draft tokens that a request really had, for each one it was allowed.
    """

    def __init__(self, max_draft_tokens: int) -> None:
        self._reached = [0.0] * max_draft_tokens
        self._kept = [0.0] * max_draft_tokens
        self._drafted = self._allowed = 0.0
        self.gains = [0.0] * (max_draft_tokens + 1)
        self.fill = 1.0
        self._update()

    def observe(self, budget: int, drafts: np.ndarray, sampled: np.ndarray) -> None:
        """Learn from a step in which each request was allowed `budget` >= 1 tokens.

        Args:
            budget: that of the step.
            drafts: int[B], tokens drafted.
            sampled: int[B], tokens sampled, the bonus token among them; 0 if nothing was verified.
        """
        accepted = np.minimum(sampled, drafts + 1)  # and one more: 0 where nothing was verified
        counts = np.bincount(accepted, minlength=budget + 2).tolist()
        rows = len(sampled) - counts[0]
        if not rows:
            return
        keep = 1 - 1 / max(_STEPS, _ROWS / rows)
        self._drafted = keep * self._drafted + float(drafts.sum())
        self._allowed = keep * self._allowed + rows * budget
        kept = rows
        for j in range(budget):
            reached, kept = kept, kept - counts[j + 1]
            self._reached[j] = keep * self._reached[j] + reached
            self._kept[j] = keep * self._kept[j] + kept
        self._fade(1 - 1 / _IDLE_STEPS, budget)
        self._update()

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

    def _update(self) -> None:
        chance, gain = 1.0, 0.0
        assumed = _ASSUMED_FIRST
        for j, (kept, reached) in enumerate(zip(self._kept, self._reached, strict=True)):
            chance *= (kept + _ASSUMED * assumed) / (reached + _ASSUMED)
            gain += chance
            self.gains[j + 1] = gain
            assumed = _ASSUMED_NEXT
        if self._allowed:
            self.fill = self._drafted / self._allowed
