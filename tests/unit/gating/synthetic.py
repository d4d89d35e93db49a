"""Simulates engines with known step times and acceptance, in order to compare gates."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from sam_rollout.core.verified import CHANCES, Offered
from sam_rollout.gating import EngineStep, Gate, hands_over
from tests.unit.gating.steps import engine_step

K = 8


def linear(rows: int, tokens: int, context: int) -> float:
    return 1e-3 + 4e-5 * tokens + 2e-9 * context


def memory_bound(rows: int, tokens: int, context: int) -> float:
    return max(5e-3 + 1e-5 * rows, 1e-4 * tokens) + 5e-9 * context


def compute_bound(rows: int, tokens: int, context: int) -> float:
    return 1e-3 + 4e-4 * tokens


def tail(requests: int, shortest: float) -> np.ndarray:
    """Return lengths of responses; the longest is 16 times as long as the shortest."""
    return np.linspace(1, 4, requests) ** 2 * shortest


@dataclasses.dataclass
class SyntheticEngines:
    """Engines that decode rounds of requests, and wait for each other in every step.

    Attributes:
        seconds: Maps numbers of requests, scored tokens and context tokens to a step's time.
        acceptance: Maps the number of running requests and the seconds since the start to the
            chance that a draft token is accepted if all earlier ones are. The drafter knows this
            chance.
        fulfilled: The true chance divided by the chance that the drafter knows.
        lengths: Lengths of the responses of each engine.
        drafting: Share of requests that have a draft.
        noise: Relative standard deviation of a step's time.
        pauses: Share of steps that take 20 times as long.
        ahead: Steps between a gate's decision and the first step with room for drafts.
        whole: Whether steps with room have k draft tokens for each request, filled up if necessary.
    """

    seconds: Callable[[int, int, int], float]
    acceptance: Callable[[int, float], float]
    lengths: Sequence[np.ndarray] = (tail(32, 100),)
    drafting: float = 0.8
    fulfilled: float = 1.0
    noise: float = 0.0
    pauses: float = 0.0
    ahead: int = 0
    whole: bool = False

    def run(self, *gates: Gate, rounds: int, seed: int = 0, exchange=lambda: None) -> float:
        """Run rounds with one gate per engine; return seconds per token, without pauses and noise.

        Raises:
            AssertionError: Two engines decided differently in a step.
        """
        random = np.random.default_rng(seed)
        now, spent, tokens = 0.0, 0.0, 0
        for _ in range(rounds):
            engines = [
                _Engine(np.array(lengths, float), [False] * self.ahead) for lengths in self.lengths
            ]
            while busy := [engine for engine in engines if len(engine.left)]:
                exchange()
                seconds = max(self.seconds(*engine.load()) for engine in busy)
                spent += seconds
                seconds *= max(0.2, 1 + self.noise * random.standard_normal())
                now += seconds * (20 if random.random() < self.pauses else 1)
                decided = set()
                for engine, gate in zip(engines, gates, strict=True):
                    if rows := len(engine.left):
                        step = engine.step(
                            int(now * 1e9), random.random((rows, K)) / self.fulfilled
                        )
                        tokens += int(step.verified.sampled.sum())
                        gate.observe(step)
                        room = engine.wishes[0] if self.ahead else True
                        budget = gate.budget(rows, room=room, whole=self.whole)
                        least = gate.least_chance
                        wish = hands_over(budget, least)
                        engine.wishes = [*engine.wishes[1:], wish]
                        budget *= room or not wish
                        matched = random.random(rows) < self.drafting
                        engine.go_on(matched, self.acceptance(rows, now), budget, least)
                        if self.whole and room:
                            engine.fill(budget > 0)
                        decided.add((budget, least))
                assert len(decided) == 1
        return spent / tokens


@functools.cache
def _chances(chance: float) -> tuple[np.ndarray, np.ndarray]:
    chances = chance ** np.arange(1, K + 1)
    classes = [next(i for i, c in enumerate(CHANCES) if one >= c) for one in chances]
    return chances, np.eye(len(CHANCES))[classes]


class _Engine:
    def __init__(self, left: np.ndarray, wishes: list[bool]) -> None:
        self.left = left  # tokens that each request still needs
        self.wishes = wishes  # whether the gate wanted drafts, step by step
        self._texts = np.full(len(left), 100, np.int32)
        self._drafts = np.zeros(len(left), np.int32)
        self._matched = np.zeros(len(left), bool)
        self._chance = 0.0  # chance that a draft token is accepted
        self._looked = False
        self._rows_before = -1
        self._filling = np.zeros(len(left), np.int32)
        self._wasted = False

    def load(self) -> tuple[int, int, int]:
        rows = len(self.left)
        return rows, rows + int((self._drafts + self._filling).sum()), int(self._texts.sum())

    def fill(self, is_open: bool) -> None:
        self._filling, self._wasted = K - self._drafts, not is_open

    def step(self, now_ns: int, luck: np.ndarray) -> EngineStep:
        right = (luck < self._chance).cumprod(axis=1).sum(axis=1)
        kept = np.minimum(right, self._drafts)
        sampled = 1 + kept.astype(np.int32)
        self._texts += sampled
        self.left -= sampled
        same_batch, self._rows_before = len(luck) == self._rows_before, len(luck)
        offered = self._offered(right) if self._looked and same_batch else None
        step = engine_step(
            now_ns, sampled, self._drafts, self._texts, same_batch=same_batch, offered=offered,
            wasted=self._wasted,
        )  # fmt: skip
        return step._replace(verified=step.verified._replace(filling=self._filling))

    def _offered(self, right: np.ndarray) -> Offered:
        chances, classes = _chances(self._chance)
        place = np.arange(K)
        # The drafts, and one more token, which is held back.
        judged = (place <= self._drafts[:, None]) & self._matched[:, None]
        asked = judged.sum(axis=0)
        kept = (judged & (place < right[:, None])).sum(axis=0)
        told = np.array([np.full(K, self._matched.sum()), asked, kept, asked * chances])
        return Offered(len(right), told @ classes)

    def go_on(self, matched: np.ndarray, chance: float, budget: int, least: float) -> None:
        alive = self.left > 0
        self.left, self._texts = self.left[alive], self._texts[alive]
        self._matched, self._chance, self._looked = matched[alive], chance, budget > 0
        worth = int((chance ** np.arange(1, budget + 1) >= least).sum())
        self._drafts = np.where(self._matched, worth, 0).astype(np.int32)
        self._filling, self._wasted = 0 * self._drafts, False
