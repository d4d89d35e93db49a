"""What came of sampling responses of the run again without drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Compared:
    """A response beside the one that the same random numbers drew without drafts.

    Attributes:
        tokens: Length of the response.
        first_difference: First place where they differ, from 0; None if they are the same.
        distance: How far that place is from a tie, in the terms of `verification.ties.TIE`;
            infinite where nothing of that kind explains it, None where it was not looked at.
        tie: Whether rounding explains the difference; None as for `distance`.
    """

    tokens: int
    first_difference: int | None = None
    distance: float | None = None
    tie: bool | None = None


def split_over(responses: int, replicas: int, step: int) -> list[int]:
    """How many responses each replica samples again; others have more of them in another step."""
    return [
        len(range((place - step * responses) % replicas, responses, replicas))
        for place in range(replicas)
    ]


def proof_metrics(found: Sequence[Compared], seconds: float) -> dict[str, float]:
    """The metrics of a training step, without prefix.

    Shares of nothing are left out: no response had drafts, none differs, or no place was looked at.
    """
    metrics = {"proof/time_s": seconds}
    if found:
        places = [one.first_difference for one in found if one.first_difference is not None]
        metrics["proof/identical_share"] = 1 - len(places) / len(found)
        if places:
            metrics["proof/first_difference"] = float(median(places))
        if looked_at := [one.tie for one in found if one.tie is not None]:
            metrics["proof/ties_share"] = sum(looked_at) / len(looked_at)
    return metrics


def proof_line(found: Sequence[Compared], seconds: float) -> str:
    """Say in a line what was found."""
    if not found:
        return "no response of this step had drafts: nothing to compare"
    differ = [one for one in found if one.first_difference is not None]
    line = (
        f"{len(found) - len(differ)} of {len(found)} responses ({sum(o.tokens for o in found):,} "
        "tokens) are the same, token for token, without drafts"
    )
    if differ:
        ties, others, unknown = ([o for o in differ if o.tie is t] for t in (True, False, None))
        line += f"; {len(differ)} differ, {len(ties)} of them first at a numerical tie"
        if others:
            first = min(others, key=lambda one: one.first_difference or 0)
            far = (
                "no distance explains it"
                if first.distance in (None, math.inf)
                else (f"{first.distance:.2g} from a tie")
            )
            line += (
                f", {len(others)} NOT (one at token {first.first_difference:,} of the response: "
                f"{far})"
            )
        if unknown:
            line += f", {len(unknown)} not looked at"
    return f"{line} ({seconds:.1f} s)"
