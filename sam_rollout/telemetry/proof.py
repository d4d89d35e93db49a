"""Reports how responses change if they are sampled again without drafts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sam_rollout.config import ProofConfig


@dataclass(frozen=True)
class Compared:
    """Compares a response with its repetition, sampled without drafts from the same random numbers.

    Attributes:
        tokens: Length of the response.
        first_difference: First position (counted from 0) where the responses differ; None if equal.
        distance: How far the two tokens at `first_difference` are from a tie (`verification.ties`);
            infinite if no tie can explain the difference, None if the distance was not computed.
        tie: Whether rounding explains the difference; None if `distance` is None.
    """

    tokens: int
    first_difference: int | None = None
    distance: float | None = None
    tie: bool | None = None


def split_over(proof: ProofConfig, replicas: int, step: int) -> list[int]:
    """Divide among replicas the responses that are sampled again; return each replica's number.

    The responses go to the replicas in turn, from one comparison to the next.
    """
    before = step // proof.every * proof.responses
    return [
        len(range((place - before) % replicas, proof.responses, replicas))
        for place in range(replicas)
    ]


def proof_metrics(found: Sequence[Compared], seconds: float) -> dict[str, float]:
    """Return a training step's metrics, named without the prefix `sam/`."""
    metrics = {"proof/time_s": seconds}
    if found:
        places = [one.first_difference for one in found if one.first_difference is not None]
        metrics["proof/identical_share"] = 1 - len(places) / len(found)
        if places:
            metrics["proof/first_difference"] = float(median(places))
        if ties := [one.tie for one in found if one.tie is not None]:
            metrics["proof/ties_share"] = sum(ties) / len(ties)
    return metrics


def proof_line(found: Sequence[Compared], seconds: float) -> str:
    """Describe the results in one line."""
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
            known = first.distance not in (None, math.inf)
            far = f"{first.distance:.2g} from a tie" if known else "no distance explains it"
            place = f"token {first.first_difference:,} of the response"
            line += f", {len(others)} NOT (one at {place}: {far})"
        if unknown:
            line += f", {len(unknown)} not checked"
    return f"{line} ({seconds:.1f} s)"
