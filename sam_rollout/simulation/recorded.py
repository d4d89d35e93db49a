"""Acceptance that was fitted beforehand (`benchmarks/simulate_acceptance.py`), by name."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sam_rollout.simulation.acceptance import Acceptance

FIRST, OWN, HISTORY = "first occurrence", "own", "own + history"
SIBLINGS = (2, 4, 8, 16)  # responses to one prompt on one engine that tables were fitted for


class RecordError(ValueError):
    """A record is missing or not what is expected."""


def siblings_table(count: int) -> str:
    """Name of the table for so many responses to one prompt on one engine."""
    return f"own + siblings, {count}"


class Recorded:
    """The record of acceptance tables.

    Args:
        path: its JSON file.

    Raises:
        RecordError: names the file and what is wrong with it.
    """

    def __init__(self, path: Path) -> None:
        try:
            tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
            self._tables = {name: Acceptance.from_json(table) for name, table in tables.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"{path}: {type(error).__name__}: {error}; it is made by "
                "benchmarks/simulate_acceptance.py"
            ) from error
        self._path = path

    def table(self, name: str, k: int) -> Acceptance:
        """A source's table for steps of k drafts."""
        try:
            return self._tables[f"{name}, k={k}"]
        except KeyError:
            known = ", ".join(sorted(self._tables))
            raise RecordError(
                f"{self._path}: no table {name!r} for k = {k}; known: {known}"
            ) from None

    def by_siblings(self, k: int) -> tuple[Acceptance, ...]:
        """Tables for 1, 2, 4, 8, 16 responses to a prompt on one engine.

        The drafter prefers its own text where that matches at least as long, so that siblings do no
        harm: where the replays of few long siblings say less than the own table, that one counts.
        The larger of two noisy figures is too large on average: this favours siblings.
        """
        own = self.table(OWN, k)
        tables = [own]
        for count in SIBLINGS:
            survival = self.table(siblings_table(count), k).refined(own.edges).survival
            tables.append(Acceptance(own.edges, np.maximum(survival, own.survival)))
        return tuple(tables)


def siblings_kind(count: int) -> int:
    """Index into `Recorded.by_siblings` for a number of responses: the largest that it reaches."""
    return sum(known <= count for known in SIBLINGS)
