"""Draws tokens by the Gumbel-max trick, with noise that drafter and target can share.

Each token of the vocabulary gets Gumbel noise g of its own, and the token with the largest
log p + g is drawn. With g = -log e, where e is exponential, that is the largest p / e, which needs
no logarithm of p. A token's noise is a function of the response's key, the position and the token's
id, and of nothing else. Whoever draws from a distribution q with the noise of the same position
therefore draws the same token often: with probability sum_i 1 / sum_j max(p_j / p_i, q_j / q_i),
which lies between (1 - TV) / (1 + TV) and 1 - TV for two distributions a total variation distance
TV apart. Drafts that are sampled so need no distribution when they are verified, and the text stays
independent of them (Daliri, Musco, Suresh, "Coupling without communication and drafter-invariant
speculative decoding", arXiv 2408.07978).

Inverting the cumulative sum (``inverse_cdf``) reads each probability once and makes one number per
row instead of one per token, but couples far less: mass that q moves from one token to another
shifts the shares of all tokens between them.
"""

from __future__ import annotations

import torch

# Random bits of a token: MurmurHash3's 32-bit finaliser (Appleby, public domain), whose constants
# these are, over the token's own hash and both halves of the row's 64 bits. 32-bit integers wrap
# around alike on every device, and take half the time of 64-bit ones.
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
# 31 bits, never all zero, to (0, 1). Where e is small, which decides, u is known to 2**-31; the
# largest u is 1 - 2**-24, so that every e is finite and every possible token stays possible.
_UNIT = (1 - 2.0**-24) * 2.0**-31
# Entries of noise at a time, in two buffers of 4 bytes each; those of a CPU stay in its cache.
_PIECE = {"cpu": 1 << 20}
_DEVICE_PIECE = 1 << 24


def draw_gumbel(probabilities: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw one token per row with Gumbel noise: ``draw_tokens`` for drafters and targets alike.

    A model that drafts calls it with its own distribution and the bits of the position it drafts
    for. No token of probability zero is ever drawn, provided the row holds a positive one.

    Args:
        probabilities: float32 [rows, vocabulary], not negative. Rows need not sum to one.
        bits: int64 [rows], random in all bits (``keyed_bits``).

    Returns:
        int64 [rows], token ids; the smaller one in a tie.
    """
    rows, vocabulary = probabilities.shape
    noise = _Noise(rows, vocabulary, probabilities.device)
    drawn = []
    for some, seeds in zip(probabilities.split(noise.rows), bits.split(noise.rows), strict=True):
        rates = noise.negative_exponentials(seeds)
        # Quotients are negative like the noise: the largest p / e is the smallest.
        drawn.append(torch.div(some, rates, out=rates).argmin(dim=-1))
    return torch.cat(drawn)


def gumbel_noise(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the noise that ``draw_gumbel`` adds to log-probabilities: float32 [rows, vocabulary].

    Args:
        bits: int64 [rows], random in all bits (``keyed_bits``).
        vocabulary: Number of tokens.
    """
    noise = _Noise(len(bits), vocabulary, bits.device)
    parts = [noise.negative_exponentials(some).neg().log().neg() for some in bits.split(noise.rows)]
    return torch.cat(parts)


class _Noise:
    """Noise of a few rows at a time, in memory that is made once."""

    def __init__(self, rows: int, vocabulary: int, device: torch.device) -> None:
        most = _PIECE.get(device.type, _DEVICE_PIECE)
        self.rows = max(1, min(rows, most // vocabulary))
        self._hashed = torch.empty(self.rows, vocabulary, dtype=torch.int32, device=device)
        self._spare = torch.empty_like(self._hashed)
        # Hashed by itself, or the noise of two rows could be that of each other, a few ids along.
        self._tokens = torch.arange(vocabulary, dtype=torch.int32, device=device)
        spare = self._spare[0]
        _fold(_fold(_fold(self._tokens, 16, spare).mul_(_MIX_1), 13, spare).mul_(_MIX_2), 16, spare)

    def negative_exponentials(self, bits: torch.Tensor) -> torch.Tensor:
        """Return -e of every token: float32 [rows, vocabulary], overwritten by the next call."""
        hashed, spare = self._hashed[: len(bits)], self._spare[: len(bits)]
        low, high = bits.to(torch.int32).unsqueeze(1), (bits >> 32).to(torch.int32).unsqueeze(1)
        torch.bitwise_xor(self._tokens, low, out=hashed)
        _fold(hashed, 16, spare).mul_(_MIX_1).add_(high)
        _fold(hashed, 13, spare).mul_(_MIX_2)
        # The sign bit goes, and so may what the shift has made of it.
        torch.bitwise_right_shift(hashed, 16, out=spare)
        hashed.bitwise_xor_(spare).bitwise_and_((1 << 31) - 1).bitwise_or_(1)
        floats = spare.view(torch.float32)
        return torch.mul(hashed, -_UNIT, out=floats).log1p_()


def _fold(bits: torch.Tensor, places: int, spare: torch.Tensor) -> torch.Tensor:
    """``bits ^= bits >> places`` with zeros shifted in, in place; int32."""
    torch.bitwise_right_shift(bits, places, out=spare)
    return bits.bitwise_xor_(spare.bitwise_and_((1 << (32 - places)) - 1))
