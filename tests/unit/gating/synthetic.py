"""Engines on paper: known step times and acceptance, to set a gate against fixed ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sam_rollout.gating import EngineStep, Gate
from tests.unit.gating.steps import engine_step

K = 8


def linear(rows: int, tokens: int, context: int) -> float:
    return 1e-3 + 4e-5 * tokens + 2e-9 * context


def memory_bound(rows: int, tokens: int, context: int) -> float:
    """Draft tokens are free up to some 50 scored tokens."""
    return max(5e-3 + 1e-5 * rows, 1e-4 * tokens) + 5e-9 * context


def compute_bound(rows: int, tokens: int, context: int) -> float:
    return 1e-3 + 4e-4 * tokens


def tail(requests: int, shortest: float) -> np.ndarray:
    """Lengths of responses, of which the longest is 16 times as long as the shortest."""
    return np.linspace(1, 4, requests) ** 2 * shortest


@dataclasses.dataclass
class SyntheticEngines:
    """Decode rounds of requests, and wait for each other in every step.

    Attributes:
        seconds: time of a step by requests, scored tokens and context tokens.
        acceptance: chance that a draft token is accepted, given that those before it were, by the
            number of running requests and the seconds since the start.
        lengths: of the responses of each engine.
        drafting: share of requests for which there is a draft.
        noise: standard deviation of a step's time, relative.
        pauses: share of steps that take 20 times as long.
    """

    seconds: Callable[[int, int, int], float]
    acceptance: Callable[[int, float], float]
    lengths: Sequence[np.ndarray] = (tail(32, 100),)
    drafting: float = 0.8
    noise: float = 0.0
    pauses: float = 0.0

    def run(
        self,
        *gates: Gate,
        rounds: int,
        seed: int = 0,
        exchange: Callable[[], object] = lambda: None,
    ) -> float:
        """Run so many rounds with a gate for each engine.

        Returns:
            The seconds a token took, pauses left out.

        Raises:
            AssertionError: two engines decided differently in a step.
        """
        random = np.random.default_rng(seed)
        now, spent, tokens = 0.0, 0.0, 0
        for _ in range(rounds):
            engines = [_Engine(np.array(lengths, float)) for lengths in self.lengths]
            while busy := [engine for engine in engines if len(engine.left)]:
                exchange()
                seconds = max(self.seconds(*engine.load()) for engine in busy)
                spent += seconds
                seconds *= max(0.2, 1 + self.noise * random.standard_normal())
                now += seconds * (20 if random.random() < self.pauses else 1)
                decided = set()
                for engine, gate in zip(engines, gates, strict=True):
                    if rows := len(engine.left):
                        hits = random.random((rows, K)) < self.acceptance(rows, now)
                        step = engine.step(int(now * 1e9), hits)
                        tokens += int(step.verified.sampled.sum())
                        gate.observe(step)
                        budget = gate.budget(rows)
                        engine.go_on(np.where(random.random(rows) < self.drafting, budget, 0))
                        decided.add(budget)
                assert len(decided) == 1
        return spent / tokens


class _Engine:
    def __init__(self, left: np.ndarray) -> None:
        self.left = left  # tokens that each request still needs
        self._texts = np.full(len(left), 100, np.int32)
        self._drafts = np.zeros(len(left), np.int32)
        self._rows_before = -1

    def load(self) -> tuple[int, int, int]:
        rows = len(self.left)
        return rows, rows + int(self._drafts.sum()), int(self._texts.sum())

    def step(self, now_ns: int, hits: np.ndarray) -> EngineStep:
        kept = np.minimum(hits.cumprod(axis=1).sum(axis=1), self._drafts)
        sampled = 1 + kept.astype(np.int32)
        self._texts += sampled
        self.left -= sampled
        same_batch, self._rows_before = len(hits) == self._rows_before, len(hits)
        return engine_step(now_ns, sampled, self._drafts, self._texts, same_batch=same_batch)

    def go_on(self, drafts: np.ndarray) -> None:
        alive = self.left > 0
        self.left, self._texts = self.left[alive], self._texts[alive]
        self._drafts = drafts[alive].astype(np.int32)
