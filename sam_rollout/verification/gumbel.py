"""Draws tokens by the Gumbel-max trick, which couples draws from similar distributions.

Each token has a probability p and its own Gumbel noise g. The token with the largest log p + g is
drawn. The noise depends only on the response's key, the position and the token's id. With the same
noise, a draw from another distribution often gives the same token (Daliri, Musco, Suresh, arXiv
2408.07978).
"""

from collections.abc import Iterator
from importlib.util import find_spec

import torch

from sam_rollout.verification.gumbel_cpu import UNIT, draw_on_cpu

# A token's random bits are made from the hash of its id and from both halves of the row's 64 bits.
# The hash function is the 32-bit finaliser of MurmurHash3 (Appleby, public domain), of which
# `_MIX_1` and `_MIX_2` are constants. The lowest 31 bits (never all zero) times `UNIT` are a
# uniform number u in (0, 1), and e = -log(1 - u) is exponential. The largest u is 1 - 2**-24, so
# every e is finite.
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)
# Number of noise values that are made at a time. On a CPU, they have to fit into the cache.
_CPU_PIECE, _DEVICE_PIECE = 1 << 20, 1 << 24
_HAS_TRITON = find_spec("triton") is not None


def draw_gumbel(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw one token per row with Gumbel noise.

    A token whose logit is minus infinity is drawn only if the row holds no finite logit.

    Args:
        logits: float32 [rows, vocabulary], log-probabilities up to a constant per row.
        bits: int64 [rows], the random bits of the drawn positions (``keyed_bits``).

    Returns:
        int64 [rows], token ids; among equally good tokens, the smallest id.
    """
    if logits.is_cpu:
        return draw_on_cpu(logits, bits)
    if logits.is_cuda and _HAS_TRITON:
        from sam_rollout.verification.gumbel_cuda import draw_on_cuda

        return draw_on_cuda(logits, bits)
    return draw_by_operations(logits, bits)


def draw_by_operations(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw like ``draw_gumbel``, with operations of torch alone."""
    drawn = [
        torch.sub(logits[rows], rates, out=rates).argmax(dim=-1)
        for rows, rates in _log_exponentials(bits, logits.shape[1])
    ]
    return torch.cat(drawn)


def gumbel_noise(bits: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the noise that ``draw_gumbel`` adds to log-probabilities, float32 [rows, tokens]."""
    return torch.cat([rates.neg() for _, rates in _log_exponentials(bits, vocabulary)])


def _log_exponentials(bits: torch.Tensor, vocabulary: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield a few rows at a time, with log e (the negated noise) of every token, float32.

    All pieces use the same memory, so the next piece overwrites a piece.
    """
    rows = max(1, min(len(bits), (_CPU_PIECE if bits.is_cpu else _DEVICE_PIECE) // vocabulary))
    all_hashed = torch.empty(rows, vocabulary, dtype=torch.int32, device=bits.device)
    all_spare = torch.empty_like(all_hashed)
    # Ids are hashed, because otherwise ranges of tokens would have equal noise in several rows.
    tokens, spare = torch.arange(vocabulary, dtype=torch.int32, device=bits.device), all_spare[0]
    _fold(_fold(_fold(tokens, 16, spare).mul_(_MIX_1), 13, spare).mul_(_MIX_2), 16, spare)
    for start in range(0, max(1, len(bits)), rows):
        some = bits[start : start + rows]
        hashed, spare = all_hashed[: len(some)], all_spare[: len(some)]
        low, high = some.to(torch.int32).unsqueeze(1), (some >> 32).to(torch.int32).unsqueeze(1)
        torch.bitwise_xor(tokens, low, out=hashed)
        _fold(hashed, 16, spare).mul_(_MIX_1).add_(high)
        _fold(hashed, 13, spare).mul_(_MIX_2)
        # Unlike the shift in `_fold`, this shift is arithmetic: it repeats the sign bit. Then the
        # mask drops bit 31. Every kernel has to do the same.
        torch.bitwise_right_shift(hashed, 16, out=spare)
        hashed.bitwise_xor_(spare).bitwise_and_((1 << 31) - 1).bitwise_or_(1)
        found = torch.mul(hashed, -UNIT, out=spare.view(torch.float32)).log1p_().neg_().log_()
        yield slice(start, start + rows), found


def _fold(bits: torch.Tensor, places: int, spare: torch.Tensor) -> torch.Tensor:
    """Do ``bits ^= bits >> places`` in place, with zeros shifted in; int32."""
    torch.bitwise_right_shift(bits, places, out=spare)
    return bits.bitwise_xor_(spare.bitwise_and_((1 << (32 - places)) - 1))
