"""Records tokens that were drawn or likeliest at the positions that the model scored (`Scored`)."""

from numba import types

from sam_rollout.automaton.compilation import INT32, INT32_2D, INT64, kernel, written
from sam_rollout.automaton.interface import (
    DRAWN_AFTER,
    DRAWN_AGAIN,
    DRAWN_DISTANCE,
    DRAWN_POSITION,
    DRAWN_TOKEN,
    FOLLOWER,
    RUN,
)

_MOST_TIMES = 1 << 20


@kernel(INT32, INT32, INT32, INT32, INT32, INT64, written(types.int32, 3))
def note_draws(tokens, positions, parents, drawn, widths, rows, table):
    """Record the tokens drawn after each draft's first wrong token, by position (`interface.py`).

    Args:
        rows: int64[M], each text's row of the table; -1 for texts without a row.
        table: int32[rows, n, DRAWN_WIDTH]; entry p % n holds position p.
    """
    first, length = 0, table.shape[1]
    for m in range(widths.size):
        stop = min(first + widths[m], tokens.size)
        right = first  # the last accepted token
        for i in range(first + 1, stop):
            if parents[i] == right - first and tokens[i] == drawn[right]:
                right = i
        # A tree may have several tokens for a position. The loop goes backwards, so the position's
        # first token, which is the likeliest, is noted last and stays.
        for i in range(stop - 1, first, -1):
            distance = positions[i] - positions[right]
            if rows[m] < 0 or drawn[i] < 0 or distance < 1:
                continue
            entry = table[rows[m], positions[i] % length]
            again = entry[DRAWN_POSITION] == positions[i] and entry[DRAWN_TOKEN] == drawn[i]
            entry[DRAWN_AGAIN] = min(entry[DRAWN_AGAIN] + 1, _MOST_TIMES) if again else 1
            entry[DRAWN_POSITION], entry[DRAWN_TOKEN] = positions[i], drawn[i]
            entry[DRAWN_AFTER], entry[DRAWN_DISTANCE] = tokens[i], distance
        first = stop


@kernel(INT32, INT32, INT32, INT32_2D)
def note_likeliest(tokens, likeliest, widths, followers):
    """Write each scored token's likeliest next token to `followers`, int32[vocab_size, 2]."""
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
                followers[token, RUN] = min(followers[token, RUN] + 1, _MOST_TIMES)
            else:
                followers[token, FOLLOWER], followers[token, RUN] = best, 1
        first += width
