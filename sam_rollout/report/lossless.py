"""Checks whether drafts changed the samples. Equal texts are expected only of coupled samplers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sam_rollout.report.runs import Both, Run, partners, whole_steps
from sam_rollout.telemetry.records import value_at

# Recorded modes that stand for a synchronous trainer of verl. Some recipes record no mode (None).
SYNCHRONOUS = {"sync", None}
TOKEN_IDS, LENGTHS = "token ids", "lengths"  # the two ways to compare responses
IDENTITY = ["step", "group", "sibling"]
_COLUMNS = {("traces", "response_ids"): TOKEN_IDS, ("requests", "response_tokens"): LENGTHS}


@dataclass(frozen=True)
class Pair:
    """Compares two runs' responses, after matching them by step, prompt and sibling number."""

    runs: tuple[str, str]
    by: str  # TOKEN_IDS or LENGTHS
    identical: int
    matched: int
    unmatched: int
    tokens: int  # Number of tokens in identical responses.
    first_step: int | None  # First training step with a response that differs or has no partner.
    # Each response that differs has a number of equal tokens before its first difference; this is
    # the smallest of these numbers. None if no response differs, or only lengths were compared.
    first_difference: int | None


@dataclass(frozen=True)
class Losslessness:
    """The comparisons of the responses of all pairs of runs."""

    coupled: bool  # Whether both sides used the same coupled sampler.
    # Whether a trainer is asynchronous. Then the weights that sample a token depend on timing.
    timed: bool
    pairs: list[Pair]  # Each pair has a run of BASE and a run of SAM, with equal seeds if possible.
    controls: list[Pair]  # Each pair has two runs of the same side.

    def sentence(self) -> str:
        """Return a sentence that says whether the texts are identical."""
        if not self.pairs:
            return "Whether the responses are identical is not recorded."
        by_length = any(pair.by == LENGTHS for pair in self.pairs)
        what = "response lengths" if by_length else "responses"
        same = sum(pair.identical for pair in self.pairs)
        total = sum(pair.matched + pair.unmatched for pair in self.pairs)
        if same == total:
            missing = "; not all texts are recorded" if by_length else ""
            return f"All {total:,} {what} are identical{missing}."
        why = "this sampler keeps the distribution, not the texts"
        if self.timed:
            why = "under an asynchronous trainer timing decides which weights sample a token"
        elif self.coupled:
            why = "the coupled sampler should have made all of them so"
        return f"The texts differ: {same:,} of {total:,} {what} are identical; {why}."


def losslessness(both: Both) -> Losslessness:
    """Compare the samples of all runs in the steps of the comparison."""
    base, sam, steps = both.base, both.sam, both.steps
    pairs = [(base[one], sam[other]) for one, other in partners(base, sam)]
    controls = [(side[0], other) for side in (base, sam) for other in side[1:]]
    configs = [run.start.config for run in both.runs]
    couplings = {config.get("coupling") or "none" for config in configs}
    modes = {value_at(config, "trainer.v1.trainer_mode") for config in configs}
    return Losslessness(
        len(couplings) == 1 and couplings != {"none"},
        not modes <= SYNCHRONOUS,
        [found for pair in pairs for found in _compared(pair, steps)],
        [found for pair in controls for found in _compared(pair, steps)],
    )


def _compared(runs: Sequence[Run], steps: list[int]) -> Iterator[Pair]:
    """Compare token ids in steps whose texts both runs recorded, and lengths in other steps."""
    left = steps
    for (table, column), by in _COLUMNS.items():
        tables = [getattr(run, table) for run in runs]
        known = [set(whole_steps(run, rows, left)) for run, rows in zip(runs, tables, strict=True)]
        both = sorted(set.intersection(*known))
        if both:
            names = [run.name for run in runs]
            yield _compare(names, by, *(_responses(rows, column, both) for rows in tables))
        left = [step for step in left if step not in both]


def _responses(rows: pd.DataFrame, column: str, steps: list[int]) -> pd.Series:
    rows = rows[rows["step"].isin(steps)]
    again = rows.groupby(IDENTITY).cumcount()
    return rows.set_index([*(rows[name] for name in IDENTITY), again])[column]


def _compare(names: Sequence[str], by: str, one: pd.Series, other: pd.Series) -> Pair:
    both = one.index.intersection(other.index)
    unmatched = one.index.symmetric_difference(other.index)
    left, right = one.reindex(both).to_list(), other.reindex(both).to_list()
    common = [_common(a, b) for a, b in zip(left, right, strict=True)]
    apart = [length for length in common if length is not None]
    differ = [entry for entry, length in zip(both, common, strict=True) if length is not None]
    steps = [entry[0] for entry in (*differ, *unmatched)]
    same = [text for text, length in zip(left, common, strict=True) if length is None]
    tokens = sum(int(text) if by == LENGTHS else len(text) for text in same)
    counts = len(same), len(both), len(unmatched), tokens
    first_step = int(min(steps)) if steps else None
    first_difference = min(apart) if apart and by == TOKEN_IDS else None
    return Pair((names[0], names[1]), by, *counts, first_step, first_difference)


def _common(one: np.ndarray | int, other: np.ndarray | int) -> int | None:
    """Return the number of equal tokens before the first difference; None if nothing differs."""
    if np.array_equal(one, other):
        return None
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return 0
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
