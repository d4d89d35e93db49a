"""The kernel that adds late tokens, which reach the host after the next step was scheduled."""

from numba import types

from sam_rollout.automaton.compilation import INT32, INT32_2D, kernel, written


@kernel(
    INT32_2D, types.int64, INT32, written(types.int64), INT32_2D, written(types.bool_, 2),
    *[INT32] * 2,
)  # fmt: skip
def take_in(tokens, vocab_size, start, rows, token_ids, is_token_ids, lengths, sampled):
    """Append a step's sampled tokens to the texts of a batch.

    Args:
        tokens: int32[S, most tokens], the step's samples; a row ends at the first invalid token id.
        start: int32[S], length of each text before the step.
        rows: int64[S], each text's row in the present batch, -1 if it has none.
        token_ids: int32[R, L], row i begins with the text of request i; written to.
        is_token_ids: bool[R, L], which places hold tokens; written to.
        lengths, sampled: int32[B], filled with lengths of texts, and numbers of tokens gained.
    """
    longest = token_ids.shape[1]
    for i in range(rows.size):
        row = rows[i]
        if row < 0:
            continue
        end = start[i]
        for place in range(tokens.shape[1]):
            token = tokens[i, place]
            if token < 0 or token >= vocab_size or end >= longest:
                break
            token_ids[row, end] = token
            is_token_ids[row, end] = True
            end += 1
        lengths[row] = end
        sampled[row] = end - start[i]
