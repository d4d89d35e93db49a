"""Finds where responses without and with drafts diverge, and whether rounding is the cause."""

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sam_rollout.config import COUPLINGS
from sam_rollout.verification.ties import GREEDY, TIE, distance_from_tie, first_difference

# Only the earliest divergences are examined, at most this many. Each examination costs a prefill.
MOST_LOOKED_AT = 256


@dataclass
class Divergence:
    """The first position at which two responses to one request differ."""

    problem: int
    sample: int
    position: int  # Index of the position in the response, from 0.
    off: int | None  # Token of the side "off"; None if that response has ended.
    on: int | None  # Token of the side "on"; None if that response has ended.
    tie: bool | None = None  # Whether rounding explains the difference; None if not examined.
    # How far the position is from a tie of its two tokens (see ``TIE``). None if the divergence was
    # not examined, or if the distance is infinite, for example because one response has ended.
    distance: float | None = None


def divergences(off: Sequence[Sequence[Any]], on: Sequence[Sequence[Any]]) -> list[Divergence]:
    """Return the divergences of two sides, which have a list of samples for each problem."""
    found = []
    for problem, (left, right) in enumerate(zip(off, on, strict=True)):
        for sample, both in enumerate(zip(left, right, strict=True)):
            texts = [response.token_ids for response in both]
            if (place := first_difference(*texts)) is not None:
                tokens = [text[place] if place < len(text) else None for text in texts]
                found.append(Divergence(problem, sample, place, *tokens))
    return found


def look_at_ties(
    parted: Sequence[Divergence],
    requests: Sequence[Any],
    off: Sequence[Sequence[Any]],
    logprobs_after: Callable[[Any, list[int]], np.ndarray],
    options: argparse.Namespace,
) -> None:
    """Find out whether rounding explains the divergences.

    Only the earliest divergences are examined, at most ``MOST_LOOKED_AT``.
    ``logprobs_after(request, text)`` returns the log-probabilities, [vocabulary], of the next
    token.
    """
    way = GREEDY if options.greedy else COUPLINGS[options.rollout_sampler]
    request_of = {(request.problem, request.sample): request for request in requests}
    for place in sorted(parted, key=lambda place: place.position)[:MOST_LOOKED_AT]:
        request = request_of[place.problem, place.sample]
        said = off[place.problem][place.sample].token_ids[: place.position]
        text = request.prompt_ids + list(said)
        logprobs = logprobs_after(request, text)
        key, tokens = request.identity.key, (place.off, place.on)
        distance = distance_from_tie(tokens, logprobs, way, key, len(text))
        place.tie = distance <= TIE[options.dtype]
        place.distance = distance if math.isfinite(distance) else None  # JSON knows no infinity
