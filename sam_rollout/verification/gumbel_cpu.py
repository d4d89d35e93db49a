"""Draws with Gumbel noise on a CPU, in one pass over the logits with hardly any logarithms.

A token with logit z beats the best score so far if its exponential number e is below exp(z - best).
The number e is at least u, the uniform number from which e is computed. So a token loses if u is at
or above an upper bound of exp(z - best). To find such a bound, write exp(z - best) as 2**x. A
straight line between the values of 2**x at the integers below and above x lies above 2**x. To
compute the line's value at x, write x plus the bias of a float's exponent as a fixed-point number
with 23 fraction bits, and read the bits of this number as a float. This cheap test rejects most
tokens. For the remaining tokens, about ten per row, e is computed in double precision.
"""

import contextlib
import functools
import itertools
import math
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from sam_rollout.automaton.compilation import kernel, warm_up, written

BLOCK = 256  # tokens that are tested against the same best score
THREAD_TOKENS = 1 << 21  # a thread gets at least this many logits, some ms of work
MIX_1, MIX_2 = np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
UNIT = (1 - 2.0**-24) * 2.0**-31
_UNIT_32 = np.float32(UNIT)
# A float's bits, read as an integer, grow by about this number if the float's logarithm grows by 1.
_PER_NAT = np.float32(2.0**23 / math.log(2))
# The bits of 1.0, plus a margin for rounding. A token whose logit is more than 88 nats below the
# best score cannot win. For every other token, rounding one operation or constant changes `fixed`
# (in `_may_win`) by no more than 64.
_ONE = np.float32(127 * 2**23 + 512)
_LARGEST = np.float32(254 * 2**23)


def draw_on_cpu(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Draw like ``draw_gumbel``, with the same arguments and result."""
    warm_up(_draw_rows)
    rows, vocabulary = logits.shape
    tokens = np.empty(rows, dtype=np.int64)
    hashes = _hashes(vocabulary)
    given = logits.detach().contiguous().numpy(), bits.contiguous().numpy(), tokens
    threads = torch.get_num_threads()
    parts = min(rows, threads, rows * vocabulary // THREAD_TOKENS)
    if parts <= 1:
        _draw_rows(*given, hashes)
    else:
        edges = itertools.pairwise(rows * part // parts for part in range(parts + 1))
        some = [[array[start:end] for array in given] for start, end in edges]
        list(_pool(threads).map(lambda arrays: _draw_rows(*arrays, hashes), some))
    return torch.from_numpy(tokens)


@functools.cache
def _hashes(vocabulary: int) -> np.ndarray:
    """Return MurmurHash3's finaliser of every token id, uint32 [vocabulary]."""
    bits = np.arange(vocabulary, dtype=np.uint32)
    bits = (bits ^ (bits >> np.uint32(16))) * MIX_1
    bits = (bits ^ (bits >> np.uint32(13))) * MIX_2
    return bits ^ (bits >> np.uint32(16))


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Make threads that may run on every core of the process.

    Engines bind the sampling thread to one core, and new threads would inherit this binding.
    """
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            cores |= os.sched_getaffinity(int(thread))
    return ThreadPoolExecutor(threads, initializer=os.sched_setaffinity, initargs=(0, cores))


os.register_at_fork(after_in_child=_pool.cache_clear)  # a child process has none of these threads


@numba.njit(inline="always")
def _number(hashed: Any, low: Any, high: Any) -> Any:
    """Return a token's 31 random bits, never all zero."""
    word = np.uint32(hashed ^ low)
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(16))) * MIX_1 + high)
    word = np.uint32(np.uint32(word ^ (word >> np.uint32(13))) * MIX_2)
    word = np.uint32(word ^ np.uint32(np.int32(word) >> np.int32(16)))
    return np.int32(np.uint32(word & np.uint32(0x7FFFFFFF)) | np.uint32(1))


@numba.njit(inline="always")
def _below(score: Any) -> Any:
    return np.nextafter(np.float32(score), np.float32(-np.inf))


@numba.njit(inline="always")
def _may_win(logit: Any, best: Any, number: Any) -> Any:
    """Return the cheap test's result; every token that beats the best score passes the test."""
    fixed = (logit - best) * _PER_NAT + _ONE
    fixed = fixed if fixed > np.float32(0) else np.float32(0)  # NaN becomes 0, too
    fixed = fixed if fixed < _LARGEST else _LARGEST
    return np.float32(number) * _UNIT_32 < np.int32(fixed).view(np.float32)


@kernel(
    written(types.float32, 2), written(types.int64), written(types.int64), written(types.uint32)
)
def _draw_rows(logits: Any, bits: Any, tokens: Any, hashes: Any) -> None:
    for row in range(len(logits)):
        low, high = np.uint32(bits[row]), np.uint32(bits[row] >> 32)
        best, token = -np.inf, 0
        for start in range(0, logits.shape[1], BLOCK):
            # Indices into slices need no checks, so the loop is compiled to vector instructions.
            some, hashed = logits[row, start : start + BLOCK], hashes[start : start + BLOCK]
            least, passed = _below(best), np.int32(0)
            for at in range(len(some)):
                number = _number(hashed[at], low, high)
                passed = np.int32(passed + _may_win(some[at], least, number))
            if passed:
                for at in range(len(some)):
                    number = _number(hashed[at], low, high)
                    if _may_win(some[at], _below(best), number):
                        exponential = -math.log1p(-UNIT * np.float64(np.float32(number)))
                        score = np.float64(some[at]) - math.log(exponential)
                        if score > best:
                            best, token = score, start + at
        tokens[row] = token
