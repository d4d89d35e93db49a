"""What became of drafts: by position, by source, by length of context."""

import re
from dataclasses import dataclass

import pandas as pd

from sam_rollout.report.runs import Run


@dataclass(frozen=True)
class Position:
    """Share of verified drafts whose token at this position (from 1) was accepted."""

    position: int
    accepted_share: float


@dataclass(frozen=True)
class SourceRow:
    """Draft tokens of one source that were verified and accepted; `rate` is accepted / drafted."""

    name: str
    drafted: float
    accepted: float
    rate: float


@dataclass(frozen=True)
class Context:
    """Verified drafts of requests whose context has `tokens` tokens or more, up to the next bin.

    `acceptance_length` counts the tokens that a verify step yields, bonus token included.
    """

    tokens: int
    verified: float
    accepted: float
    acceptance_length: float


@dataclass(frozen=True)
class Acceptance:
    """The drafts of one side, over its runs and the compared steps.

    A list is empty where the runs recorded nothing for it.
    """

    positions: list[Position]
    sources: list[SourceRow]
    contexts: list[Context]


def acceptance(runs: list[Run], steps: list[int]) -> Acceptance:
    """What the metrics of `runs` say of their drafts."""
    names = sorted(set().union(*(run.steps.columns for run in runs)))
    sources, contexts = [], []
    for source in _suffixes(names, "drafted_", r"(?!context_|tokens$)\w+"):
        drafted, accepted = (_sum(runs, steps, f"{k}_{source}") for k in ("drafted", "accepted"))
        if drafted:
            sources.append(SourceRow(source, drafted, accepted, accepted / drafted))
    for tokens in sorted(map(int, _suffixes(names, "verify_context_"))):
        verified, accepted = (
            _sum(runs, steps, f"{k}_context_{tokens}") for k in ("verify", "accepted")
        )
        if verified:
            contexts.append(Context(tokens, verified, accepted, 1 + accepted / verified))
    positions = _positions(runs, steps, _suffixes(names, "accepted_position_"))
    return Acceptance(positions, sources, contexts)


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


def _sum(runs: list[Run], steps: list[int], kind: str) -> float:
    """A count of all runs and steps."""
    return float(_column(runs, steps, f"sam/draft/{kind}").sum())
