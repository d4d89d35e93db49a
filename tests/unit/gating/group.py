"""Engines on paper that wait for each other in every step, and exchange reports at its start."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from sam_rollout.gating.agreement import IDLE, Report
from sam_rollout.gating.guard import GuardedGate
from sam_rollout.gating.step import EngineStep
from tests.unit.gating.steps import decode, engine_step


class Table:
    """Where the ranks of a group lay their reports down; `exchange` hands them out."""

    def __init__(self, ranks: int) -> None:
        self.laid_down = [IDLE] * ranks
        self.handed_out = np.array(self.laid_down, np.int32)
        self.exchanges = 0

    def exchange(self) -> None:
        self.handed_out = np.array(self.laid_down, np.int32)
        self.laid_down = [IDLE] * len(self.laid_down)
        self.exchanges += 1


class Seat:
    """The exchange of one rank."""

    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def publish(self, report: Report) -> None:
        self._table.laid_down[self._rank] = report

    def received(self) -> tuple[int, np.ndarray]:
        return self._table.exchanges, self._table.handed_out


class Group:
    """Gates of a group, stepped together.

    Args:
        make: gate of a rank, from its exchange.
        ranks: of the group.
    """

    def __init__(self, make: Callable[[Seat], GuardedGate], ranks: int) -> None:
        self.table = Table(ranks)
        self.gates = [make(Seat(self.table, rank)) for rank in range(ranks)]

    def step(self, rows: Sequence[int]) -> list[int | None]:
        """Budgets after a step with so many requests in each engine; None for a dummy batch."""
        self.table.exchange()
        return [
            gate.next_budget(decode(count)) if count else None
            for gate, count in zip(self.gates, rows, strict=True)
        ]


@dataclasses.dataclass
class SyntheticGroup:
    """Decodes rounds of requests in engines whose steps take as long as the longest of them.

    Attributes:
        seconds: time of an engine's step by requests, scored tokens and context tokens.
        acceptance: chance that a draft token is accepted, given that those before it were.
        lengths: of the responses of each engine.
    """

    seconds: Callable[[int, int, int], float]
    acceptance: float
    lengths: Sequence[Sequence[int]]
    k: int = 8

    def run(self, gates: Sequence[GuardedGate], table: Table, rounds: int, seed: int = 0) -> float:
        """Run so many rounds; returns the seconds they took.

        Raises:
            AssertionError: two engines decided differently in a step.
        """
        random = np.random.default_rng(seed)
        now = 0.0
        for _ in range(rounds):
            engines = [_Engine(np.array(lengths, float)) for lengths in self.lengths]
            while any(len(engine.left) for engine in engines):
                table.exchange()
                busy = [engine for engine in engines if len(engine.left)]
                now += max(self.seconds(*engine.load()) for engine in busy)
                decided = set()
                for engine, gate in zip(engines, gates, strict=True):
                    if len(engine.left):
                        step = engine.step(int(now * 1e9), random, self.acceptance, self.k)
                        budget = gate.next_budget(step)
                        engine.go_on(budget)
                        decided.add(budget)
                assert len(decided) == 1
        return now


class _Engine:
    def __init__(self, left: np.ndarray) -> None:
        self.left = left  # tokens that each request still needs
        self._texts = np.full(len(left), 100, np.int32)
        self._drafts = np.zeros(len(left), np.int32)
        self._rows_before = -1

    def load(self) -> tuple[int, int, int]:
        rows = len(self.left)
        return rows, rows + int(self._drafts.sum()), int(self._texts.sum())

    def step(
        self, now_ns: int, random: np.random.Generator, acceptance: float, k: int
    ) -> EngineStep:
        rows = len(self.left)
        hits = (random.random((rows, k)) < acceptance).cumprod(axis=1).sum(axis=1)
        sampled = 1 + np.minimum(hits, self._drafts).astype(np.int32)
        self._texts += sampled
        self.left -= sampled
        same_batch, self._rows_before = rows == self._rows_before, rows
        return engine_step(now_ns, sampled, self._drafts, self._texts, same_batch=same_batch)

    def go_on(self, budget: int) -> None:
        alive = self.left > 0
        self.left, self._texts = self.left[alive], self._texts[alive]
        self._drafts = np.full(len(self.left), budget, np.int32)
