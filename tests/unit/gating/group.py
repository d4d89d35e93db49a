"""Makes gates for engines that exchange reports at the start of every step."""

from collections.abc import Callable, Sequence

import numpy as np

from sam_rollout.gating.agreement import IDLE, Report
from sam_rollout.gating.gate import Gate
from tests.unit.gating.steps import decode


class Table:
    """Keeps the reports of a group's ranks; `exchange` hands them out."""

    def __init__(self, ranks: int) -> None:
        self.laid_down = [IDLE] * ranks
        self.handed_out = np.array(self.laid_down, np.int32)
        self.exchanges = 0

    def exchange(self) -> None:
        self.handed_out = np.array(self.laid_down, np.int32)
        self.laid_down = [IDLE] * len(self.laid_down)
        self.exchanges += 1


class Seat:
    def __init__(self, table: Table, rank: int) -> None:
        self._table, self._rank = table, rank

    def publish(self, report: Report) -> None:
        self._table.laid_down[self._rank] = report

    def received(self) -> tuple[int, np.ndarray]:
        return self._table.exchanges, self._table.handed_out


class Group:
    """The gates of a group; `make` returns a rank's gate, which reports through the rank's seat."""

    def __init__(self, make: Callable[[Seat], Gate], ranks: int) -> None:
        self.table = Table(ranks)
        self.gates = [make(Seat(self.table, rank)) for rank in range(ranks)]

    def step(self, rows: Sequence[int]) -> list[int | None]:
        """Return the gates' budgets after a step; None for an engine without requests.

        `rows[i]` is the number of requests in engine i.
        """
        self.table.exchange()
        return [
            gate.next_budget(decode(count)) if count else None
            for gate, count in zip(self.gates, rows, strict=True)
        ]
