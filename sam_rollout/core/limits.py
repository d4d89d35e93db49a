"""What an engine was started with, as far as it bounds drafts."""

from typing import NamedTuple

# More draft tokens than this are never accepted in useful numbers by copies of earlier text, while
# the verify batch of every step grows with them.
MAX_DRAFT_TOKENS = 32
MOST_STEP_TOKENS = 4096  # draft tokens of trees in a step: accelerators stop being idle far below
UNKNOWN_VOCABULARY = (1 << 31) - 1  # every token id but the largest


class Limits(NamedTuple):
    """One engine's limits, handed to all that keep a row for each request or a place for a token.

    The drafter and the session set `k` themselves; other callers may leave it out.
    """

    max_rows: int  # most requests in one batch (max_num_seqs)
    max_model_len: int  # longest text, tokens
    vocab_size: int = UNKNOWN_VOCABULARY  # tokens of the model; ids of drafts are below it
    max_batched_tokens: int = 1 << 62  # most tokens of a step
    k: int = MAX_DRAFT_TOKENS  # most draft tokens of a request (sam.max_draft_tokens)
