"""Draws with Gumbel noise on an NVIDIA GPU, in one pass over the logits.

The random numbers are the same as in ``gumbel.py``. The kernel has not run on a GPU yet: tests
compile it for a GPU and run it in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

from sam_rollout.verification.gumbel_cpu import MIX_1, MIX_2, UNIT

BLOCK = 2048  # tokens read at a time; the best token is kept for each place in a block
_MIX_1 = tl.constexpr(int(MIX_1))
_MIX_2 = tl.constexpr(int(MIX_2))
_UNIT = tl.constexpr(UNIT)


def draw_on_cuda(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw like ``draw_gumbel``, with the same arguments and result."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _draw_row[(rows,)](logits.contiguous(), bits.contiguous(), tokens, vocabulary, BLOCK=BLOCK)
    return tokens


@triton.jit
def _draw_row(logits, bits, tokens, vocabulary, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    seed = tl.load(bits + row)
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    places = tl.arange(0, BLOCK)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    drawn = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocabulary, BLOCK):
        token = start + places
        score = tl.load(logits + row * vocabulary + token, token < vocabulary, float("-inf"))
        word = _mix(_mix(token.to(tl.uint32), 0) ^ low, high)
        # In the other kernels, the last right shift is arithmetic, so a set sign bit flips bits 16
        # to 30. `_mix` shifts zeros in, so these bits are flipped here. The sign bit is dropped.
        word = tl.where(word >> 31 != 0, word ^ 0x7FFF0000, word) & 0x7FFFFFFF | 1
        uniform = word.to(tl.int32).to(tl.float32) * _UNIT
        rest = 1.0 - uniform
        # This is -log1p(-u), exact where u is small. Triton's interpreter has no log1p.
        exponential = tl.where(rest == 1.0, uniform, tl.log(rest) * uniform / (rest - 1.0))
        score -= tl.log(exponential)
        wins = score > best  # False for NaN
        best = tl.where(wins, score, best)
        drawn = tl.where(wins, token, drawn)
    most = tl.max(best, axis=0)
    tl.store(tokens + row, tl.min(tl.where(best == most, drawn, vocabulary - 1), axis=0))


@triton.jit
def _mix(word, add):
    """Return MurmurHash3's finaliser of `word`, with `add` added after the first product."""
    word = (word ^ (word >> 16)) * _MIX_1 + add
    word = (word ^ (word >> 13)) * _MIX_2
    return word ^ (word >> 16)
