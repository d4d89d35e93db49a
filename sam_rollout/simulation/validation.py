"""Predicted against measured: rollouts of the tiny model that `benchmarks/simulate_validation`
recorded, predicted from step costs, lengths and the acceptance of other rollouts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sam_rollout.bench.sides import OWN
from sam_rollout.bench.traces import read_traces
from sam_rollout.gating import ThresholdGate
from sam_rollout.simulation.chances import Acceptance, fit_from_right, right_drafts
from sam_rollout.simulation.costs import CostTable
from sam_rollout.simulation.policies import gate_budget, no_drafts
from sam_rollout.simulation.rollout import Fleet, Setting, simulate
from sam_rollout.simulation.workload import round_of, side_named

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
RECORD = RESULTS / "simulate_validation.json"
TRACES = RESULTS / "traces" / "simulate_validation.parquet"
MAX_ERROR = 0.10
EDGES = (0, 100, 200, 300, 450, 600, 800)  # contexts of the chances; the model stops near 1,100


class ValidationError(ValueError):
    """The record of the validation is missing or not what is expected."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One rollout, measured and predicted, seconds.

    `predicted_s` and `tail_s` with chances fitted on other rollouts, `exact_s` with the acceptance
    that the rollout's own texts give.
    """

    k: int
    threshold: int
    max_num_seqs: int
    step: int
    measured_s: float
    predicted_s: float
    exact_s: float
    measured_tail_s: float
    predicted_tail_s: float

    @property
    def ratio(self) -> float:
        """Predicted / measured."""
        return self.predicted_s / self.measured_s

    @property
    def reached(self) -> bool:
        """Whether the prediction is within `MAX_ERROR`."""
        return abs(self.ratio - 1) <= MAX_ERROR


class Validation:
    """The record, and what it is predicted from.

    Args:
        record: JSON of `benchmarks/simulate_validation`.
        traces: parquet of the same.

    Raises:
        ValidationError: a file is missing or damaged.
    """

    def __init__(self, record: Path, traces: Path) -> None:
        try:
            content = json.loads(record.read_text(encoding="utf-8"))
            self._setting = content["setting"]
            self._tables = {part: CostTable.from_json(table)
                            for part, table in content["costs"].items()}  # fmt: skip
            self.rollouts: list[dict[str, Any]] = content["rollouts"]
            self._texts = read_traces(traces)
        except (OSError, KeyError, ValueError) as error:
            raise ValidationError(
                f"{record}, {traces}: {type(error).__name__}: {error}; they are made by "
                "benchmarks/simulate_validation.py"
            ) from error
        longest = max(rollout["k"] for rollout in self.rollouts)
        rights = right_drafts(self._texts, side_named(OWN), longest)
        self._right = {id(text): right for text, right in zip(self._texts, rights, strict=True)}

    def rows(self, progress: Callable[[int, int], None] | None = None) -> list[Row]:
        """Every recorded rollout, predicted."""
        found = []
        for number, rollout in enumerate(self.rollouts):
            found.append(self._row(rollout))
            if progress is not None:
                progress(number + 1, len(self.rollouts))
        return found

    def acceptance(self, k: int) -> Acceptance:
        """Chances fitted on the rollouts set apart for it."""
        texts = [text for text in self._texts if text.step in self._setting["fit_steps"]]
        rights = [(len(text.prompt), self._right[id(text)]) for text in texts]
        return fit_from_right(rights, EDGES, max(k, 1))

    def _row(self, rollout: dict[str, Any]) -> Row:
        k, threshold = rollout["k"], rollout["threshold"]
        texts = [text for text in self._texts if text.step == rollout["step"]]
        round_ = round_of(texts, [self._right[id(text)] for text in texts])
        costs = self._tables[f"on{k}" if k else "off"].compile(max(k, 1))
        setting = Setting(
            gate_budget(ThresholdGate(threshold, k)) if k else no_drafts,
            self.acceptance(k),
            tail_threshold=self._setting["tail_threshold"],
        )
        fleet = Fleet(1, rollout["max_num_seqs"])
        exact = simulate(round_, fleet, costs, setting)
        drawn = [
            simulate(dataclasses.replace(round_, right=None), fleet, costs, setting, seed=seed)
            for seed in range(5 if k else 1)
        ]
        return Row(
            k, threshold, rollout["max_num_seqs"], rollout["step"], rollout["rollout_s"],
            float(np.mean([one.rollout_s for one in drawn])), exact.rollout_s,
            rollout["tail_s"], float(np.mean([one.tail_s for one in drawn])),
        )  # fmt: skip
