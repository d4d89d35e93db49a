"""An engine on paper: known step times and acceptance, to set a gate against fixed ones."""

import dataclasses
from collections.abc import Callable

import numpy as np

from sam_rollout.gating import Gate
from tests.unit.gating.steps import engine_step


@dataclasses.dataclass
class SyntheticEngine:
    """Decodes rounds of requests.

    Attributes:
        seconds: time of a step by requests, scored tokens and context tokens.
        acceptance: chance that a draft token is accepted, given that those before it were, by the
            number of running requests and the seconds since the start.
        drafting: share of requests for which there is a draft.
        noise: standard deviation of a step's time, relative.
        pauses: share of steps that take 20 times as long.
    """

    seconds: Callable[[int, int, int], float]
    acceptance: Callable[[int, float], float]
    requests: int = 32
    length: int = 400  # of the shortest response; the longest has 4 times as many tokens
    drafting: float = 0.8
    noise: float = 0.0
    pauses: float = 0.0
    k: int = 8

    def run(self, gate: Gate, rounds: int, seed: int = 0) -> float:
        """Run so many rounds; returns the seconds a token took, pauses left out."""
        random = np.random.default_rng(seed)
        now, spent, tokens = 0.0, 0.0, 0
        for _ in range(rounds):
            left = np.linspace(1, 4, self.requests) ** 2 / 4 * self.length
            texts = np.full(self.requests, 100, np.int32)
            drafts = np.zeros(self.requests, np.int32)
            before = len(left) + 1
            while len(left):
                rows = len(left)
                seconds = self.seconds(rows, rows + int(drafts.sum()), int(texts.sum()))
                spent += seconds
                seconds *= max(0.2, 1 + self.noise * random.standard_normal())
                now += seconds * (20 if random.random() < self.pauses else 1)
                hits = random.random((rows, self.k)) < self.acceptance(rows, now)
                sampled = 1 + np.minimum(hits.cumprod(axis=1).sum(axis=1), drafts).astype(np.int32)
                tokens += int(sampled.sum())
                texts += sampled
                left -= sampled
                same_batch = before == rows
                gate.observe(
                    engine_step(int(now * 1e9), sampled, drafts, texts, same_batch=same_batch)
                )
                budget = gate.budget(rows)
                drafts = np.where(random.random(rows) < self.drafting, budget, 0).astype(np.int32)
                before, alive = rows, left > 0
                left, texts, drafts = left[alive], texts[alive], drafts[alive]
        return spent / tokens
