"""What became of drafts: by position, by source, by length of context."""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sam_rollout.report.runs import Run
from sam_rollout.sources import NAMES


@dataclass(frozen=True)
class Position:
    """Share of verified drafts whose token at this position (from 1) was accepted."""

    position: int
    accepted_share: float


@dataclass(frozen=True)
class SourceRow:
    """Draft tokens of one source that were verified and accepted."""

    name: str
    drafted: float
    accepted: float

    @property
    def rate(self) -> float:
        """Accepted of the drafted ones."""
        return self.accepted / self.drafted


@dataclass(frozen=True)
class Context:
    """Verified drafts of requests whose context has `tokens` tokens or more, up to the next bin."""

    tokens: int
    verified: float
    accepted: float

    @property
    def acceptance_length(self) -> float:
        """Tokens a verify step yields, bonus token included."""
        return 1 + self.accepted / self.verified


@dataclass(frozen=True)
class Acceptance:
    """Of one side, over its runs and the compared steps; a list is empty if nothing tells of it."""

    positions: list[Position]
    sources: list[SourceRow]
    contexts: list[Context]


def acceptance(runs: list[Run], steps: list[int]) -> Acceptance:
    """What the metrics of `runs` say of their drafts."""
    names = sorted(set().union(*(run.steps.columns for run in runs)))
    return Acceptance(
        _positions(runs, steps, _suffixes(names, "accepted_position_")),
        [
            source
            for name in _suffixes(names, "drafted_", r"(?!context_|tokens$)\w+")
            if (source := _source(runs, steps, name)).drafted
        ],
        [
            context
            for tokens in sorted(map(int, _suffixes(names, "verify_context_")))
            if (context := _context(runs, steps, tokens)).verified
        ],
    )


def _suffixes(names: list[str], stem: str, pattern: str = r"\d+") -> list[str]:
    found = (re.fullmatch(f"sam/draft/{stem}({pattern})", name) for name in names)
    return [match[1] for match in found if match]


def _positions(runs: list[Run], steps: list[int], positions: list[str]) -> list[Position]:
    verified = _verified(runs, steps)
    if not verified.sum() > 0:
        return []
    shares = {
        position: _column(runs, steps, f"sam/draft/accepted_position_{position}").fillna(0.0)
        for position in sorted(map(int, positions))
    }
    return [
        Position(position, float((share * verified).sum() / verified.sum()))
        for position, share in shares.items()
    ]


def _verified(runs: list[Run], steps: list[int]) -> pd.Series:
    """Drafts verified in each step of each run: accepted_tokens / (acceptance_length - 1)."""
    accepted = _column(runs, steps, "sam/draft/accepted_tokens")
    gained = _column(runs, steps, "sam/draft/acceptance_length") - 1
    return (accepted / gained.where(gained > 0)).fillna(0.0)


def _column(runs: list[Run], steps: list[int], name: str) -> pd.Series:
    """A metric of all runs one after the other, NaN where it is unknown."""
    return pd.concat([run.values(name, steps) for run in runs], ignore_index=True)


def _source(runs: list[Run], steps: list[int], name: str) -> SourceRow:
    drafted, accepted = (
        sum(float(_of_source(run, steps, kind, name).sum()) for run in runs)
        for kind in ("drafted", "accepted")
    )
    return SourceRow(name, drafted, accepted)


def _of_source(run: Run, steps: list[int], kind: str, name: str) -> pd.Series:
    """Tokens of a source in each of `steps`: by the engine steps, else by the run's counter."""
    counted = run.values(f"sam/draft/{kind}_{name}", steps).fillna(0.0)
    if name not in NAMES:
        return counted
    rows = run.engine_steps[run.engine_steps["step"].isin(steps)]
    drafted, tokens = (_by_source(rows[f"{column}_per_source"]) for column in ("drafted", kind))
    by_step = rows[["step", "draft_tokens"]].assign(
        # Older folders do not tell sources apart, nor does an engine that stopped taking notes.
        by_source=drafted.sum(axis=1),
        tokens=tokens[:, NAMES.index(name)],
    )
    summed = by_step.groupby("step").sum()
    whole = summed["by_source"] == summed["draft_tokens"]
    return summed["tokens"].where(whole).reindex(steps).fillna(counted)


def _by_source(lists: pd.Series) -> np.ndarray:
    """Lists by source as float [rows, sources]; 0 where there is none."""
    table = np.zeros((len(lists), len(NAMES)))
    told = lists.map(lambda row: row is not None and len(row) > 0).to_numpy(dtype=bool)
    if told.any():
        table[told] = np.stack(lists[told].to_list())
    return table


def _context(runs: list[Run], steps: list[int], tokens: int) -> Context:
    verified, accepted = (
        float(_column(runs, steps, f"sam/draft/{kind}_context_{tokens}").sum())
        for kind in ("verify", "accepted")
    )
    return Context(tokens, verified, accepted)
