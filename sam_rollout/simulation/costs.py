"""What an engine step costs: measured rows, and the grid that a simulation reads them from.

A cost table is a JSON list of rows `{batch, query_len, context, graph, median_s, iqr_s, device,
versions}`: the median time of a step in which `batch` requests of `context` known tokens each score
`query_len` tokens (1: decode; k + 1: verify k drafts and sample one more), in a captured graph or
eager. A row may also have `mean_s`. A rollout's time is the sum of its steps, which means give and
medians miss (slow steps count, too): where a row has a mean, the simulation uses that. Rows with a
`query_len` of at least `PREFILL_QUERY` are prompts being computed.

Between rows the time is linear in context, then in batch, then in query length. Beyond the last
context, batch and query length it goes on as between the last two rows, but never falls: it stays
at the last row's time where the last two rows do. Below the first, the first counts. Where a table
holds one row of an axis only, that axis is flat.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from sam_rollout.simulation.kernel import along, step_seconds

FloatArray = npt.NDArray[np.float64]
MIN_STEPS = 8  # recorded steps that make a row
REQUIRED = ("batch", "query_len", "context", "graph", "median_s")  # of a row in JSON
PREFILL_QUERY = 34  # more than any step verifies: MAX_DRAFT_TOKENS + 1


class CostTableError(ValueError):
    """A file or a list of rows that is no cost table; the text says what was expected."""


@dataclasses.dataclass(frozen=True)
class CostRow:
    """One measured kind of step."""

    batch: int
    query_len: int
    context: int
    graph: bool
    median_s: float
    iqr_s: float = 0.0
    device: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    mean_s: float | None = None

    @property
    def seconds(self) -> float:
        """What such a step adds to a rollout: the mean where it was measured."""
        return self.median_s if self.mean_s is None else self.mean_s

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("query_len", 1), ("context", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CostTableError(f"{name} = {value!r}: must be an integer from {least} on")
        if not isinstance(self.graph, bool):
            raise CostTableError(f"graph = {self.graph!r}: must be true or false")
        for name in ("median_s", *(() if self.mean_s is None else ("mean_s",))):
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value < math.inf:
                raise CostTableError(f"{name} = {value!r}: must be a number above 0")


@dataclasses.dataclass(frozen=True)
class StepCosts:
    """Times of steps on a grid, as the simulation reads them.

    Attributes:
        batches: float64[B], ascending.
        contexts: float64[C], ascending.
        seconds: float64[K + 1, B, C], of a step in which k = 0..K drafts are verified.
        prefill_s_per_token: what a prompt token adds to the step that computes it.
    """

    batches: FloatArray
    contexts: FloatArray
    seconds: FloatArray
    prefill_s_per_token: float = 0.0

    def at(self, batch: float, k: int, context: float) -> float:
        """Seconds of one step."""
        grids = self.batches, self.contexts, self.seconds
        return float(step_seconds(*grids, float(batch), k, float(context)))


def _linear(x: float, grid: FloatArray, values: FloatArray) -> float:
    """Value at `x`: linear, constant below the grid; above as in its last stretch, or constant."""
    if len(grid) == 1 or x <= grid[0]:
        return float(values[0])
    i = min(int(np.searchsorted(grid, x)), len(grid) - 1)
    share = (x - grid[i - 1]) / (grid[i] - grid[i - 1])
    return float(along(values[i - 1], values[i], share))


class CostTable:
    """Measured rows of one device.

    Args:
        rows: at least one decode row (query_len 1).

    Raises:
        CostTableError: no decode row.
    """

    def __init__(self, rows: Iterable[CostRow]) -> None:
        self.rows = list(rows)
        if not any(row.query_len == 1 for row in self.rows):
            raise CostTableError("no row with query_len 1: a cost table needs decode steps")

    @classmethod
    def from_json(cls, content: Any) -> CostTable:
        """From a list of rows, or an object that has it under `rows`."""
        rows = content.get("rows") if isinstance(content, Mapping) else content
        if not isinstance(rows, list):
            raise CostTableError("expected a list of rows, or an object with rows")
        return cls(_row(number, row) for number, row in enumerate(rows, start=1))

    def verified_up_to(self, k: int) -> int:
        """Most requests that a step with at least `k` drafts was measured with; 0 for none.

        Raises:
            CostTableError: no verify step at all: drafts would cost nothing.
        """
        rows = [row for row in self.rows if 1 < row.query_len < PREFILL_QUERY]
        if not rows:
            raise CostTableError(
                "no row with query_len 2 or more: what drafts cost is not in this table; measure "
                "verify steps, or take them from a run with sam=on"
            )
        return max((row.batch for row in rows if row.query_len > k), default=0)

    @classmethod
    def read(cls, path: Path) -> CostTable:
        """From a JSON file.

        Raises:
            CostTableError: names the file and what is wrong with it.
            OSError: no such file, or no permission.
        """
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise CostTableError(f"{path}: {error}") from error

    @classmethod
    def of_steps(cls, steps: pd.DataFrame, device: str = "") -> CostTable:
        """From the engine steps that a run recorded, rows of `telemetry.records.ENGINE_STEPS`.

        Steps that compute no prompt, medians by batch and drafts a request (rounded), batches in
        stretches of a factor of 1.25. The context is not recorded: the table is flat in it.

        Raises:
            CostTableError: no decode step among them.
        """
        plain = steps[(steps["scheduled"] > 0) & (steps["prompt_tokens"] == 0)]
        k = (plain["draft_tokens"] / plain["scheduled"]).round().astype(int)
        stretch = (np.log(plain["scheduled"]) / np.log(1.25)).round()
        rows = []
        for (drafts, _), cell in plain.groupby([k, stretch]):
            if len(cell) >= MIN_STEPS:
                low, median, high = cell["duration_s"].quantile([0.25, 0.5, 0.75])
                batch = round(float(cell["scheduled"].mean()))
                rows.append(CostRow(batch, int(drafts) + 1, 0, False, median, high - low, device))
        prompts = steps[steps["prompt_tokens"] >= PREFILL_QUERY]
        for step in prompts.itertuples():
            batch = max(int(step.scheduled), 1)
            query = max(round(step.prompt_tokens / batch), PREFILL_QUERY)
            rows.append(CostRow(batch, query, 0, False, step.duration_s, 0.0, device))
        return cls(rows)

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        return [dataclasses.asdict(row) for row in self.rows]

    def compile(
        self, max_k: int, *, captured: Iterable[int] | None = None, pad: bool = False
    ) -> StepCosts:
        """The grid for up to `max_k` drafts a step.

        Args:
            max_k: most draft tokens of a step.
            captured: query lengths that graphs were captured for; None runs eager. Every other
                query length falls back to eager steps: a gate that shuts leaves a graph captured
                for k + 1 tokens.
            pad: steps with another query length are filled up to the next captured one.

        Raises:
            CostTableError: a captured length without a row that was measured with its graph.
        """
        steps = [row for row in self.rows if row.query_len < PREFILL_QUERY]
        batches = np.array(sorted({row.batch for row in steps}), float)
        contexts = np.array(sorted({row.context for row in steps}), float)
        eager, graphs = (
            _surfaces([row for row in steps if row.graph == graph], batches, contexts)
            for graph in (False, True)
        )
        lengths = sorted(captured or ())
        unmeasured = [length for length in lengths if length not in graphs]
        if unmeasured:
            raise CostTableError(
                "graph mode needs rows with graph = true for every captured query length (a "
                "baseline's is 1); not measured: " + ", ".join(map(str, unmeasured))
            )
        seconds = []
        for query in range(1, max_k + 2):
            fitting = [length for length in lengths if length == query or (pad and length > query)]
            if fitting:
                seconds.append(graphs[fitting[0]])
            elif 1 in eager:
                seconds.append(_between(eager, query))
            else:
                raise CostTableError("no eager row with query_len 1")
        return StepCosts(batches, contexts, np.array(seconds), self._prefill())

    def _prefill(self) -> float:
        """Seconds a prompt token: median over the prefill rows, less nothing."""
        rates = [row.seconds / (row.batch * row.query_len) for row in self.rows
                 if row.query_len >= PREFILL_QUERY]  # fmt: skip
        return float(np.median(rates)) if rates else 0.0


def _row(number: int, content: Any) -> CostRow:
    """One row of a JSON table; errors name it."""
    if not isinstance(content, Mapping):
        raise CostTableError(f"row {number} = {content!r}: must be an object")
    for name in REQUIRED:
        if name not in content:
            raise CostTableError(f"row {number}: no {name}; a row needs {', '.join(REQUIRED)}")
    names = (field.name for field in dataclasses.fields(CostRow))
    try:
        return CostRow(**{name: content[name] for name in names if name in content})
    except CostTableError as error:
        raise CostTableError(f"row {number}: {error}") from error


def _surfaces(
    rows: list[CostRow], batches: FloatArray, contexts: FloatArray
) -> dict[int, FloatArray]:
    """Query length -> seconds [B, C], what was not measured filled in."""
    surfaces = {}
    for query in sorted({row.query_len for row in rows}):
        mine = [row for row in rows if row.query_len == query]
        measured = np.array(sorted({row.batch for row in mine}), float)
        lines = []
        for batch in measured:
            at: dict[int, list[float]] = {}
            for row in mine:
                if row.batch == batch:
                    at.setdefault(row.context, []).append(row.seconds)
            # What was measured more than once counts as its mean.
            line = [(context, np.mean(values)) for context, values in sorted(at.items())]
            known, values = np.array(line, float).T
            lines.append([_linear(context, known, values) for context in contexts])
        columns = np.array(lines).T  # [C, measured]
        surfaces[query] = np.array(
            [[_linear(batch, measured, column) for column in columns] for batch in batches]
        )
    return surfaces


def _between(surfaces: dict[int, FloatArray], query: int) -> FloatArray:
    """Seconds [B, C] at a query length, linear between those measured."""
    known = np.array(sorted(surfaces), float)
    stack = np.stack([surfaces[int(length)] for length in known])
    return np.apply_along_axis(lambda values: _linear(query, known, values), 0, stack)
