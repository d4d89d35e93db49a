"""Summarises a comparison in two sentences: the times, and whether the texts are equal."""

from sam_rollout.core.statistics import Estimate
from sam_rollout.report.compare import TIMES, Comparison, TimeRow, number

_SUBJECTS = {"tail": "a token of the long tail", "rollout": "a rollout", "step": "a training step"}

_REASONS = 3  # largest number of reasons in the sentence


def sentences(comparison: Comparison) -> tuple[str, str]:
    """Return a sentence about times, with reasons for doubt, and a sentence about samples."""
    return _time(comparison), comparison.lossless.sentence()


def _doubt(comparison: Comparison) -> str:
    if comparison.fair is False:
        kinds = list(dict.fromkeys(found.name.replace("_", " ") for found in comparison.unfair))
        reasons = ", ".join(kinds[:_REASONS]) + (" and others" if kinds[_REASONS:] else "")
        return f"Not a fair comparison ({reasons}): with"
    if comparison.fair is None:
        return "It is unknown whether this comparison is fair: with"
    return f"Fair, but {comparison.caveat}: with" if comparison.caveat else "With"


def _time(comparison: Comparison) -> str:
    for key, subject in _SUBJECTS.items():
        row = comparison.times.get(key)
        gain = row and (row.equal_tokens if key == "tail" else row.raw)
        if row and gain:
            base, sam = _shown(comparison, row)
            ratio = _ratio(gain.speed_up_minus_one, comparison.noise)
            return f"{_doubt(comparison)} drafts {subject} took {sam} instead of {base}: {ratio}"
    return "No time is recorded on both sides."


def _shown(comparison: Comparison, row: TimeRow) -> tuple[str, str]:
    if row.key != "tail":
        return f"{number(row.base.per_step)} s", f"{number(row.sam.per_step)} s"
    (kind,) = (kind for kind in TIMES if kind.key == row.key)
    assert row.tokens is not None  # because the row has a gain at equal tokens
    spent, tokens = comparison.sides(kind.spent[0], row.tokens)
    return (
        f"{number(1e3 * spent.base.sum() / tokens.base.sum())} ms",
        f"{number(1e3 * spent.sam.sum() / tokens.sam.sum())} ms",
    )


def _ratio(faster: Estimate, noise: str) -> str:
    slower = faster.value < 0
    ends = [1 + end for end in (faster.value, faster.low, faster.high) if end is not None]
    if slower:
        ends = [1 / end if end else float("inf") for end in ends]
    ratio = f"{ends[0]:.2f} times as {'long' if slower else 'fast'}"
    if len(ends) == 1:
        return f"{ratio}, a single step without an interval that could exclude chance."
    interval = f"{min(ends[1:]):.2f} to {max(ends[1:]):.2f}"
    within = ", of the noise within runs only" if noise == "within runs" else ""
    if faster.clear:
        return f"{ratio} (95 % interval {interval}{within})."
    return f"{ratio}, but the 95 % interval, {interval}{within}, does not exclude chance."
