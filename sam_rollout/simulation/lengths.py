"""Lengths of responses where none were recorded: a lognormal body and a share that never ends."""

from __future__ import annotations

import dataclasses

import numpy as np
from scipy.optimize import brentq

from sam_rollout.simulation.rollout import Round

PROMPT_TOKENS = 150  # of a problem of DAPO-Math-17k, about; no figure depends on it


@dataclasses.dataclass(frozen=True)
class LengthModel:
    """Response lengths of one step.

    Attributes:
        mean: of all responses, tokens.
        sigma: of the logarithm of the body.
        capped_share: of the responses, written up to the limit whatever the others do.
        limit: `max_response_length`.
        between_groups: share of the body's variance that the responses to a prompt have in common.
    """

    mean: float
    sigma: float
    capped_share: float
    limit: int
    between_groups: float = 0.0

    def draw(self, prompts: int, siblings: int, seed: int) -> Round:
        """A round of `prompts` groups of `siblings` responses, in order of arrival."""
        random = np.random.default_rng([seed, 7])
        count = prompts * siblings
        own = random.standard_normal(count)
        common = np.repeat(random.standard_normal(prompts), siblings)
        share = self.between_groups
        z = np.sqrt(1 - share) * own + np.sqrt(share) * common
        length = np.minimum(np.exp(self._location() + self.sigma * z), self.limit)
        length[random.random(count) < self.capped_share] = self.limit
        return Round(
            np.full(count, PROMPT_TOKENS),
            np.maximum(length, 1).astype(np.int64),
            np.repeat(np.arange(prompts), siblings),
        )

    def _location(self) -> float:
        """Mean logarithm of the body, so that all responses have the asked mean."""
        body = (self.mean - self.capped_share * self.limit) / (1 - self.capped_share)
        if not 1 < body < self.limit:
            raise ValueError(f"no body of mean {body:.0f} below the limit {self.limit}")
        z = np.random.default_rng(0).standard_normal(4096)

        def excess(location: float) -> float:
            return float(np.minimum(np.exp(location + self.sigma * z), self.limit).mean() - body)

        return float(brentq(excess, 0.0, np.log(self.limit) + 5))
