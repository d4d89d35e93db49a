"""The table of the source `recycling`: the follower of each token (FOLLOWERS in `interface.py`)."""

from sam_rollout.automaton.compilation import INT32, INT32_2D, kernel
from sam_rollout.automaton.interface import FOLLOWER, RUN

_LONGEST_RUN = 1 << 20


@kernel(INT32, INT32, INT32, INT32_2D)
def hear(tokens, likeliest, widths, followers):
    """Note the likeliest follower of each scored token.

    Args:
        tokens, likeliest, widths: fields of `Scored`.
        followers: int32[vocab_size, 2], the table.
    """
    size, first = followers.shape[0], 0
    for width in widths:
        last = min(first + width, tokens.size) - 1
        while last > first and tokens[last] == tokens[first]:  # the step's padding
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
