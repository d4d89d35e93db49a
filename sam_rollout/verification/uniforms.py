"""Computes random bits as a pure function of a response's key and a token's position.

The generator is SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). Its n-th output is a hash of ``key + n * GOLDEN``, so the generator needs no state.
Integer arithmetic gives the same bits on every device.
"""

import torch

STREAMS = 2  # number of independent random numbers per position
# 64-bit constants of SplitMix64, as the signed integers that torch holds.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def keyed_bits(keys: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Return 64 random bits per (key, position), int64 [rows]; the sign bit is random, too.

    Args:
        keys: int64 [rows], the key of each row's response.
        positions: Integer [rows], each token's position in its text.
        stream: Number of the stream, below ``STREAMS``; streams are independent.
    """
    counter = positions.to(torch.int64) * STREAMS + (stream + 1)
    bits = keys + counter * _GOLDEN  # int64 arithmetic wraps around, as the algorithm needs
    bits = (bits ^ logical_shift(bits, 30)) * _MIX_1
    bits = (bits ^ logical_shift(bits, 27)) * _MIX_2
    return bits ^ logical_shift(bits, 31)


def logical_shift(bits: torch.Tensor, places: int) -> torch.Tensor:
    """Shift right and fill with zeros (torch's ``>>`` on int64 repeats the sign bit)."""
    return (bits >> places) & ((1 << (64 - places)) - 1)
