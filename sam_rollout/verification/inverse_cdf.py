"""Draws tokens from rows of probabilities, with one random number per row.

Cumulative sums are taken over integers (fixed point), because integer sums do not depend on the
order of summation. A large vocabulary is divided into blocks: a draw selects a block first, and
then a token in this block.
"""

import torch

from sam_rollout.verification.uniforms import logical_shift

# In fixed point, the probability 1 is 2**40. The error is at most 2**-40, below the precision of a
# float32 softmax. Products with 22 random bits stay below 2**63.
FRACTION_BITS = 40
_RANDOM_BITS = 22  # bits of each of the two random numbers that a draw uses
BLOCK = 512  # tokens per block; near the square root of a large vocabulary


def draw_tokens(probabilities: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting the row's cumulative distribution.

    A token of probability zero is drawn only if the row holds no positive probability.

    Args:
        probabilities: float32 [rows, vocabulary], not negative. A row may sum to less than one, but
            must not exceed one by much.
        bits: int64 [rows], random in all bits (``keyed_bits``).

    Returns:
        int64 [rows], token ids.
    """
    vocabulary = probabilities.shape[1]
    if vocabulary <= 2 * BLOCK:
        tokens, _ = _draw(to_fixed_point(probabilities), bits)
        return tokens.clamp_(0, vocabulary - 1)
    block, rest = _draw(_block_masses(probabilities), bits)
    first = block * BLOCK
    columns = first.unsqueeze(1) + torch.arange(BLOCK, device=probabilities.device)
    inside = probabilities.gather(1, columns.clamp(max=vocabulary - 1))
    inside = to_fixed_point(inside).masked_fill_(columns >= vocabulary, 0)
    offset, _ = _search(inside, inside.cumsum(dim=1), rest)
    return (first + offset).clamp_(0, vocabulary - 1)


def to_fixed_point(probabilities: torch.Tensor) -> torch.Tensor:
    """Convert probabilities to integers, rounded up so that every possible token stays possible."""
    return probabilities.mul(2.0**FRACTION_BITS).ceil_().to(torch.int64)


def _block_masses(probabilities: torch.Tensor) -> torch.Tensor:
    """Sum the probabilities in each block (the last may be smaller); return int64 [rows, blocks].

    Whole blocks are summed in floating point, because converting every token would be slow. Every
    sum has ``BLOCK`` terms, so the order of summation does not depend on the number of rows.
    """
    rows, vocabulary = probabilities.shape
    whole = vocabulary // BLOCK * BLOCK
    masses = to_fixed_point(probabilities[:, :whole].view(rows, -1, BLOCK).sum(dim=-1))
    if whole == vocabulary:
        return masses
    rest = to_fixed_point(probabilities[:, whole:]).sum(dim=-1, keepdim=True)
    return torch.cat((masses, rest), dim=1)


def _draw(masses: torch.Tensor, bits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the entry in each row that the row's random bits select; `bits` is int64 [rows]."""
    cumulative = masses.cumsum(dim=1)
    return _search(masses, cumulative, _scale(bits, cumulative[:, -1]))


def _search(
    masses: torch.Tensor,  # int64 [rows, n]
    cumulative: torch.Tensor,  # int64 [rows, n], cumulative sums of `masses`
    target: torch.Tensor,  # int64 [rows]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the entry in each row whose interval of the cumulative sum contains the row's target.

    Returns:
        The entry's index, and the target's offset within the interval, both int64 [rows].
    """
    # If the target lies beyond the sum, the last entry is taken. This may happen because a block's
    # tokens may sum to less than the block's mass.
    target = torch.minimum(target, cumulative[:, -1] - 1)
    index = (cumulative <= target.unsqueeze(1)).sum(dim=1)
    here = index.clamp(max=masses.shape[1] - 1).unsqueeze(1)
    before = cumulative.gather(1, here) - masses.gather(1, here)
    return index, target - before.squeeze(1)


def _scale(bits: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return ``floor(u * total)`` without overflow; u in [0, 1) is made of 44 random bits."""
    mask = (1 << _RANDOM_BITS) - 1
    high = logical_shift(bits, 64 - _RANDOM_BITS)
    low = (bits >> (64 - 2 * _RANDOM_BITS)) & mask
    return (high * total + ((low * total) >> _RANDOM_BITS)) >> _RANDOM_BITS
