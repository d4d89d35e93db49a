"""Tests whether rounding explains that two texts with the same random numbers differ.

If rounding is the only cause, the texts first differ at a position where the random number hardly
prefers either of two tokens. Such a position is a tie, up to rounding.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import numpy as np
import torch

from sam_rollout.verification.gumbel import gumbel_noise
from sam_rollout.verification.uniforms import keyed_bits

# By dtype, the largest distance from a tie that rounding explains. The distance is the difference
# between two log-probabilities with noise added. For draws by inversion, it is the distance of the
# random number from the boundary between the intervals of both tokens.
TIE = {"float32": 1e-3, "bfloat16": 0.05, "float16": 0.02}
RANDOM_BITS = 44  # a draw by inversion uses this many of a position's 64 random bits
GREEDY, GUMBEL, INVERSION = "greedy", "gumbel", "inversion"  # ways to draw


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first position where two texts differ, None if they are the same."""
    pairs = enumerate(zip_longest(one, other))
    return next((position for position, (left, right) in pairs if left != right), None)


def distance_from_tie(
    tokens: Sequence[int | None], logprobs: np.ndarray, way: str, key: int, position: int
) -> float:
    """Return how far a position is from a tie of two tokens; compare the result with ``TIE``.

    For ``GREEDY`` and ``GUMBEL``, this is the highest log-probability minus that of the less likely
    token. For ``GUMBEL``, noise is first added to all log-probabilities. For ``INVERSION``, see
    ``distance_of_draw``.

    Args:
        tokens: The tokens of both texts at the position; None if a text has ended, and then the
            result is infinite.
        logprobs: [vocabulary], log-probabilities of the distribution that is sampled from.
        way: ``GREEDY``, ``GUMBEL`` or ``INVERSION``.
        key: The key of the request's random numbers.
        position: Index of the position in the text, which begins with the prompt.
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

    A token is None if a response has ended; then the distance is infinite.
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
    """Return the number in [0, 1) that draws the token at a position by inversion."""
    bits = int(_bits(key, position)[0]) & ((1 << 64) - 1)
    return (bits >> (64 - RANDOM_BITS)) / 2**RANDOM_BITS


def noise_of(key: int, position: int, vocabulary: int) -> np.ndarray:
    """Return the noise that is added to the position's log-probabilities, float32 [vocabulary]."""
    return gumbel_noise(_bits(key, position), vocabulary)[0].numpy()
