"""The targets of `sam-rollout bench drafter --check`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from sam_rollout.bench import sides
from sam_rollout.bench.verdicts import Verdict

# What drafts are worth on every real set: mean acceptance length against another side.
LONGER = (
    # k, side, other side, least gain
    (3, sides.DEFAULT, sides.ARCTIC_4, 0.04),
    (8, sides.DEFAULT, sides.ARCTIC_4, 0.04),
    (3, sides.OWN, sides.FIRST, 0.01),
    (3, sides.OWN_SIBLINGS, sides.OWN, 0.05),
)
WITH_EPOCHS = (3, sides.ALL_SOURCES, sides.OWN_SIBLINGS, 0.05)  # of sets with an earlier epoch
# What they cost.
CALL_ROWS, CALL_CONTEXT = 128, 32_768
MAX_CALL_US, MIN_CALL_SPEEDUP = 350.0, 15.0
MAX_CATCH_UP_NS = 150.0
MAX_BYTES_PER_TOKEN = {sides.OWN: 64.0, sides.OWN_SIBLINGS: 140.0}
MAX_GROWTH = 3.0
MAX_SLOWEST_MS = 2.0

OURS = "own"  # names of our own sides begin with it


# What a target looks at: a table of the result, what else names the row, the side.
Key = tuple[Any, ...]
Measured = tuple[str, bool | None]
Target = tuple[str, list[Key], Callable[..., Measured]]


def judge(result: dict[str, Any]) -> list[Verdict]:
    """Hold a result of `Bench.run` against the targets."""
    names = {"acceptance": ("data", "k"), "calls": ("rows", "context"), "costs": ()}
    rows = {
        (table, *(row[name] for name in others), row["side"]): row
        for table, others in names.items()
        for row in result[table]
    }
    verdicts = []
    for target, keys, measure in [*_longer_drafts(result["sets"]), *_COSTS]:
        absent = [key[-1] for key in keys if key not in rows]
        if absent:
            why = f"{absent[0]} is not there: {result['missing'].get(absent[0], 'not measured')}"
            # A peer may be absent; what this project promises may not.
            verdict = Verdict(target, why, False if absent[0].startswith(OURS) else None)
        else:
            verdict = Verdict(target, *measure(*(rows[key] for key in keys)))
        verdicts.append(verdict)
    return verdicts


def _longer_drafts(sets: list[dict[str, Any]]) -> list[Target]:
    """Each target in words, the rows it looks at, and how they are measured."""
    return [
        (
            f"{one['name']}, k = {k}: {side} at least {least:.0%} longer than {other}",
            [("acceptance", one["name"], k, side), ("acceptance", one["name"], k, other)],
            partial(_longer, least),
        )
        for one in sets
        for k, side, other, least in (*LONGER, *[WITH_EPOCHS] * (one["read_before"] > 0))
    ]


def _longer(least: float, row: dict[str, Any], other: dict[str, Any]) -> Measured:
    mine, theirs = row["mean_acceptance_length"], other["mean_acceptance_length"]
    gain = mine / theirs - 1
    return f"{gain:+.1%} ({mine:.3f}, {theirs:.3f})", gain >= least


def _at_most(figure: str, most: float, unit: str, row: dict[str, Any]) -> Measured:
    return f"{row[figure]:.3g} {unit}", row[figure] <= most


def _speedup(mine: dict[str, Any], theirs: dict[str, Any]) -> Measured:
    speedup = theirs["median_us"] / mine["median_us"]
    text = f"{speedup:.1f}x ({mine['median_us']:.0f} us, {theirs['median_us']:.0f} us)"
    return text, speedup >= MIN_CALL_SPEEDUP


def _left(cost: dict[str, Any]) -> Measured:
    """By the drafter's own count."""
    left = cost["left_bytes"] - cost["start_bytes"]
    return f"{left} bytes", left <= 0


_OWN, _CALL = ("costs", sides.OWN), ("calls", CALL_ROWS, CALL_CONTEXT)
_BOTH = sides.OWN_SIBLINGS  # two automata read every token
_COSTS: list[Target] = [
    (f"{_BOTH}, call of {CALL_ROWS} rows at {CALL_CONTEXT} tokens: at most {MAX_CALL_US:.0f} us",
     [(*_CALL, _BOTH)], partial(_at_most, "median_us", MAX_CALL_US, "us")),
    (f"{sides.OWN}, the same: at least {MIN_CALL_SPEEDUP:.0f}x as fast as {sides.NGRAM_24}",
     [(*_CALL, sides.OWN), (*_CALL, sides.NGRAM_24)], _speedup),
    (f"{_BOTH}, catching up: at most {MAX_CATCH_UP_NS:.0f} ns a token",
     [("costs", _BOTH)], partial(_at_most, "median_ns", MAX_CATCH_UP_NS, "ns")),
    (f"256k against 1k tokens: at most {MAX_GROWTH:.0f}x the time per token",
     [_OWN], partial(_at_most, "growth", MAX_GROWTH, "x")),
    (f"slowest call: at most {MAX_SLOWEST_MS:.0f} ms of CPU time",
     [_OWN], partial(_at_most, "slowest_ms", MAX_SLOWEST_MS, "ms")),
    *(
        target
        for side, most in MAX_BYTES_PER_TOKEN.items()
        for target in (
            (f"{side}: at most {most:.0f} bytes a token",
             [("costs", side)], partial(_at_most, "bytes_per_token", most, "bytes")),
            (f"{side}: memory back to where it began when all requests have ended",
             [("costs", side)], _left),
        )
    ),
]  # fmt: skip
