"""A table of what follows a token: kind FOLLOWERS of places (`interface.py`)."""

from numba import njit, types

from sam_rollout.automaton.compilation import WarmUp, compile_kernels
from sam_rollout.automaton.interface import FOLLOWER, RUN

_LONGEST_RUN = 1 << 20


@njit(nogil=True)
def hear(tokens, likeliest, widths, followers):
    """Note what follows each token; arguments as `Source.hear`, and the table."""
    size, first = followers.shape[0], 0
    for width in widths:
        last = min(first + width, tokens.size) - 1
        while last > first and tokens[last] == tokens[first]:  # filling
            last -= 1
        for i in range(first, last + 1):
            token, best = tokens[i], likeliest[i]
            if not (0 <= token < size and 0 <= best < size):
                continue
            if followers[token, FOLLOWER] == best:
                followers[token, RUN] = min(followers[token, RUN] + 1, _LONGEST_RUN)
            else:
                followers[token, FOLLOWER], followers[token, RUN] = best, 1
        first += width


_TOKENS = types.Array(types.int32, 1, "C")
_SIGNATURES = ((hear, (*[_TOKENS] * 3, types.Array(types.int32, 2, "C"))),)


def warm_up() -> WarmUp:
    """Compile what this module runs in every step, as `automaton.kernels.warm_up` does."""
    return compile_kernels(_SIGNATURES)
