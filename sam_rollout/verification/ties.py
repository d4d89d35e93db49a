"""Tests whether rounding can explain a difference between two texts with the same random numbers.

If rounding is the only cause, a tiny change of the logits has changed the token at the first
position where the texts differ. Such a position is close to a tie between the two tokens.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
import torch

from sam_rollout.verification.gumbel import gumbel_noise
from sam_rollout.verification.uniforms import keyed_bits

# For each dtype, the largest distance from a tie that rounding can explain. The distance is the
# difference between two log-probabilities with noise added. For draws by inversion, each token has
# an interval, and the distance is how far the random number lies from the farther interval.
TIE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
RANDOM_BITS = 44  # number of a position's 64 random bits that a draw by inversion uses
GREEDY, GUMBEL, INVERSION = "greedy", "gumbel", "inversion"  # ways to draw


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two texts differ; None if they are the same."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (left, right) in pairs if left != right), None)


def distance_from_tie(
    tokens: Sequence[int | None], logprobs: np.ndarray, way: str, key: int, position: int
) -> float:
    """Return how far a position is from a tie of two tokens; compare the result with ``TIE``.

    For ``GREEDY`` and ``GUMBEL``, the distance is the highest log-probability in the vocabulary
    minus the lower one of the two tokens' log-probabilities. For ``GUMBEL``, noise is first added
    to all log-probabilities. For ``INVERSION``, see ``distance_of_draw``.

    Args:
        tokens: The tokens of both texts at the position. If a text has ended, its token is None,
            and the result is infinite.
        logprobs: [vocabulary], log-probabilities of the distribution that is sampled from.
        way: ``GREEDY``, ``GUMBEL`` or ``INVERSION``.
        key: The key of the request's random numbers.
        position: Index of the position in the text, prompt included.
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
    """Return how far ``uniform`` would have to move to draw the most distant of ``tokens``.

    If a token is None, because a response has ended, the distance is infinite.
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
    """Return the random number in [0, 1) for drawing the token at a position by inversion."""
    bits = int(_bits(key, position)[0]) & ((1 << 64) - 1)
    return (bits >> (64 - RANDOM_BITS)) / 2**RANDOM_BITS


def noise_of(key: int, position: int, vocabulary: int) -> np.ndarray:
    """Return the noise that is added to a position's log-probabilities, float32 [vocabulary]."""
    return gumbel_noise(_bits(key, position), vocabulary)[0].numpy()
