"""The limits of an engine that bound drafts."""

from typing import NamedTuple

# Copies of earlier text never have more useful draft tokens than this, while every verify step
# grows with them.
MAX_DRAFT_TOKENS = 32
MOST_STEP_TOKENS = 4096  # draft tokens of all trees in a step; accelerators are busy far below
UNKNOWN_VOCABULARY = (1 << 31) - 1  # every token id but the largest


class Limits(NamedTuple):
    """One engine's limits, for modules that keep a row per request or a place per token.

    The drafter and the session set `k` themselves; other callers may leave it out.
    """

    max_rows: int  # most requests in one batch (max_num_seqs)
    max_model_len: int  # longest text, tokens
    vocab_size: int = UNKNOWN_VOCABULARY  # tokens in the vocabulary; draft ids are below it
    max_batched_tokens: int = 1 << 62  # most tokens of a step
    k: int = MAX_DRAFT_TOKENS  # most draft tokens of a request (sam.max_draft_tokens)
