"""Where the responses of two sides part, and whether rounding explains it.

Responses with the same random numbers part only where these make a tie of two tokens. The
distribution of the engine at that place says how far from a tie it is.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np

# How far two tokens may lie apart, in log-probability with the position's noise, for the difference
# of the sides to count as rounding; with coupled_inversion, how far the random number may lie from
# the boundary between them, in probability.
TIE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
RANDOM_BITS = 44  # of a position's 64 bits, those that decide its token
# In bfloat16 most long responses diverge somewhere, and examining a divergence costs the prefill of
# the text up to it; those at early positions are the cheapest. A fault behind one divergence in
# fifty still shows up about five times in 256.
MOST_LOOKED_AT = 256


@dataclass
class Divergence:
    """Where two responses to one request diverge.

    ``position`` counts tokens of the response from 0; the tokens are None where a response has
    ended. ``tie`` says whether rounding explains the difference, None if that was not examined.
    ``distance`` is how far the place is from a tie (see ``TIE``); it is None also if no distance
    explains the difference, as where one response has ended and the other has not.
    """

    problem: int
    sample: int
    position: int
    off: int | None
    on: int | None
    tie: bool | None = None
    distance: float | None = None


def first_difference(off: Sequence[int], on: Sequence[int]) -> int | None:
    """Return the first position where two texts differ, None if they are the same."""
    pairs = enumerate(zip_longest(off, on))
    return next((position for position, (left, right) in pairs if left != right), None)


def divergences(off: Sequence[Sequence[Any]], on: Sequence[Sequence[Any]]) -> list[Divergence]:
    """List the requests whose two responses differ; responses are by problem and sample."""
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
    """Find out which of the first ``MOST_LOOKED_AT`` divergences rounding explains.

    ``logprobs_after(request, text)`` returns the engine's log-probabilities, [vocabulary], of the
    token that follows ``text``.
    """
    request_of = {(request.problem, request.sample): request for request in requests}
    for place in sorted(parted, key=lambda place: place.position)[:MOST_LOOKED_AT]:
        request = request_of[place.problem, place.sample]
        said = off[place.problem][place.sample].token_ids[: place.position]
        text = request.prompt_ids + list(said)
        logprobs = logprobs_after(request, text)
        distance = _distance(place, logprobs, request.identity.key, len(text), options)
        place.tie = distance <= TIE[options.dtype]
        place.distance = distance if math.isfinite(distance) else None  # JSON knows no infinity


def _distance(
    place: Divergence, logprobs: np.ndarray, key: int, position: int, options: argparse.Namespace
) -> float:
    """How far a place is from a tie, in the terms of ``TIE``.

    Greedy responses: are both tokens as likely as the likeliest one? Sampled ones: are they once
    Gumbel noise is added? By inversion: would the position's random number, moved a little, have
    drawn either token?
    """
    tokens = (place.off, place.on)
    if not options.greedy and options.rollout_sampler != "coupled":
        return distance_of_draw(np.exp(logprobs), uniform_of(key, position), tokens)
    if not options.greedy:
        logprobs = logprobs + noise_of(key, position, len(logprobs))
    values = [-math.inf if token is None else logprobs[token] for token in tokens]
    return float(logprobs.max() - min(values))


def distance_of_draw(
    probabilities: np.ndarray, uniform: float, tokens: Iterable[int | None]
) -> float:
    """How far ``uniform`` would have to move for each of ``tokens`` to be drawn; the largest.

    ``probabilities``, [vocabulary], are in the order of token ids. None stands for a response that
    has ended: it cannot be drawn, the distance is infinite.
    """
    cumulative = np.cumsum(probabilities / probabilities.sum())
    farthest = 0.0
    for token in tokens:
        if token is None:
            return math.inf
        low = cumulative[token - 1] if token else 0.0
        farthest = max(farthest, low - uniform, uniform - cumulative[token])
    return float(farthest)


def _bits(key: int, position: int) -> Any:
    import torch

    from sam_rollout.verification import keyed_bits

    return keyed_bits(torch.tensor([key]), torch.tensor([position]))


def uniform_of(key: int, position: int) -> float:
    """Return the number in [0, 1) that coupled_inversion draws a token of the text from."""
    bits = int(_bits(key, position)[0]) & ((1 << 64) - 1)
    return (bits >> (64 - RANDOM_BITS)) / 2**RANDOM_BITS


def noise_of(key: int, position: int, vocabulary: int) -> np.ndarray:
    """Return what coupled adds to the position's log-probabilities, float32 [vocabulary]."""
    from sam_rollout.verification import gumbel_noise

    return gumbel_noise(_bits(key, position), vocabulary)[0].numpy()
