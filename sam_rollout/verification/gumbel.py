"""Draws tokens by the Gumbel-max trick: the noise of a token is its own, whoever draws.

Each token of the vocabulary gets Gumbel noise g of its own, and the token with the largest
log p + g is drawn. A token's noise is a function of the response's key, the position and the
token's id, and of nothing else. Whoever draws from a distribution q with the noise of the same
position therefore draws the same token often: with probability
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i), which lies between (1 - TV) / (1 + TV) and 1 - TV for two
distributions a total variation distance TV apart (Daliri, Musco, Suresh, "Coupling without
communication and drafter-invariant speculative decoding", arXiv 2408.07978). q may be what other
rounding makes of p, or what a draft model thinks.

Inverting the cumulative sum (``inverse_cdf``) couples far less: mass that moves from one token to
another shifts the shares of all tokens between them.

A device without a kernel of its own draws by a handful of torch operations on a few rows at a time.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch

from sam_rollout.verification.gumbel_cpu import UNIT, draw_on_cpu

# Random bits of a token: MurmurHash3's 32-bit finaliser (Appleby, public domain), whose constants
# these are, over the token's own hash and both halves of the row's 64 bits. 32-bit integers wrap
# around alike on every device, and take half the time of 64-bit ones. 31 bits, never all zero,
# times ``UNIT`` are in (0, 1). Where e is small, which decides, u is known to 2**-31; the largest u
# is 1 - 2**-24, so that every e is finite and every possible token stays possible.
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
# Entries of noise at a time, in two buffers of 4 bytes each; those of a CPU stay in its cache.
_PIECE = {"cpu": 1 << 20}
_DEVICE_PIECE = 1 << 24
_HAS_TRITON = find_spec("triton") is not None


def draw_gumbel(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw one token per row with Gumbel noise, for drafters and targets alike.

    A model that drafts calls it with its own logits and the bits of the position it drafts for. No
    token whose logit is minus infinity is ever drawn, provided the row holds a finite one.

    Args:
        logits: float32 [rows, vocabulary]: log-probabilities, each row plus any constant.
        bits: int64 [rows], random in all bits (``keyed_bits``).

    Returns:
        int64 [rows], token ids; the smaller one in a tie.
    """
    if logits.is_cpu:
        return draw_on_cpu(logits, bits)
    if logits.is_cuda and _HAS_TRITON:
        from sam_rollout.verification.gumbel_cuda import draw_on_cuda

        return draw_on_cuda(logits, bits)
    return draw_by_operations(logits, bits)


def draw_by_operations(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw as ``draw_gumbel`` does with torch's operations alone, for devices without a kernel."""
    rows, vocabulary = logits.shape
    noise = _Noise(rows, vocabulary, logits.device)
    drawn = []
    for some, seeds in zip(logits.split(noise.rows), bits.split(noise.rows), strict=True):
        rates = noise.log_exponentials(seeds)
        drawn.append(torch.sub(some, rates, out=rates).argmax(dim=-1))
    return torch.cat(drawn)


def gumbel_noise(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the noise that ``draw_gumbel`` adds to log-probabilities: float32 [rows, vocabulary].

    Args:
        bits: int64 [rows], random in all bits (``keyed_bits``).
        vocabulary: Number of tokens.
    """
    noise = _Noise(len(bits), vocabulary, bits.device)
    return torch.cat([noise.log_exponentials(some).neg() for some in bits.split(noise.rows)])


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

    def log_exponentials(self, bits: torch.Tensor) -> torch.Tensor:
        """Return -g = log e of every token: float32 [rows, vocabulary], for this call only."""
        hashed, spare = self._hashed[: len(bits)], self._spare[: len(bits)]
        low, high = bits.to(torch.int32).unsqueeze(1), (bits >> 32).to(torch.int32).unsqueeze(1)
        torch.bitwise_xor(self._tokens, low, out=hashed)
        _fold(hashed, 16, spare).mul_(_MIX_1).add_(high)
        _fold(hashed, 13, spare).mul_(_MIX_2)
        # The sign bit goes, and so may what the shift has made of it.
        torch.bitwise_right_shift(hashed, 16, out=spare)
        hashed.bitwise_xor_(spare).bitwise_and_((1 << 31) - 1).bitwise_or_(1)
        floats = spare.view(torch.float32)
        return torch.mul(hashed, -UNIT, out=floats).log1p_().neg_().log_()


def _fold(bits: torch.Tensor, places: int, spare: torch.Tensor) -> torch.Tensor:
    """``bits ^= bits >> places`` with zeros shifted in, in place; int32."""
    torch.bitwise_right_shift(bits, places, out=spare)
    return bits.bitwise_xor_(spare.bitwise_and_((1 << (32 - places)) - 1))
