"""Whether rounding explains that two texts with the same random numbers differ.

Two texts drawn with the same random numbers diverge only where these numbers leave two tokens tied,
apart from rounding. The
distribution at the place where they part says how far from a tie it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
import torch

from sam_rollout.verification.gumbel import gumbel_noise
from sam_rollout.verification.uniforms import keyed_bits

# How far two tokens may lie apart, in log-probability with the position's noise, for a difference
# to count as rounding; drawn by inversion, how far the random number may lie from the boundary
# between them, in probability.
TIE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
RANDOM_BITS = 44  # of a position's 64 bits, those that decide its token by inversion
GREEDY, GUMBEL, INVERSION = "greedy", "gumbel", "inversion"  # ways to draw


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two texts differ, None if they are the same."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (left, right) in pairs if left != right), None)


def distance_from_tie(
    tokens: Sequence[int | None], logprobs: np.ndarray, way: str, key: int, position: int
) -> float:
    """Return how far a place is from a tie of two tokens, in the terms of ``TIE``.

    Greedy: are both tokens as likely as the likeliest one? With Gumbel noise: are they once that is
    added? By inversion: would the position's random number, moved a little, have drawn either?

    Args:
        tokens: What the two texts have there; None where a text has ended, which no distance
            explains: the result is infinite.
        logprobs: [vocabulary], of the distribution that is sampled from.
        way: ``GREEDY``, ``GUMBEL`` or ``INVERSION``.
        key: What the request's random numbers are keyed by.
        position: Place in the text, its prompt included.
    """
    if way == INVERSION:
        return distance_of_draw(np.exp(logprobs), uniform_of(key, position), tokens)
    if way == GUMBEL:
        logprobs = logprobs + noise_of(key, position, len(logprobs))
    values = [-math.inf if token is None else logprobs[token] for token in tokens]
    return float(logprobs.max() - min(values))


def distance_of_draw(
    probabilities: np.ndarray, uniform: float, tokens: Iterable[int | None]
) -> float:
    """Return the largest distance that ``uniform`` would have to move to draw each of ``tokens``.

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


def _bits(key: int, position: int) -> torch.Tensor:
    return keyed_bits(torch.tensor([key]), torch.tensor([position]))


def uniform_of(key: int, position: int) -> float:
    """Return the number in [0, 1) that a token of the text is drawn from by inversion."""
    bits = int(_bits(key, position)[0]) & ((1 << 64) - 1)
    return (bits >> (64 - RANDOM_BITS)) / 2**RANDOM_BITS


def noise_of(key: int, position: int, vocabulary: int) -> np.ndarray:
    """Return the noise that is added to the position's log-probabilities, float32 [vocabulary]."""
    return gumbel_noise(_bits(key, position), vocabulary)[0].numpy()
