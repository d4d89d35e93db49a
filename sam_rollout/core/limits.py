"""The limits of an engine, which bound its drafts."""

from typing import NamedTuple

import numpy as np

# Longer drafts would hardly save more time, and each draft token makes a verify step larger.
MAX_DRAFT_TOKENS = 32
# Maximum of `sam.step_budget`, the number of tree tokens per step. Fewer tokens already keep a
# device busy.
MOST_STEP_TOKENS = 4096
UNKNOWN_VOCABULARY = (1 << 31) - 1  # Stands for the size of an unknown vocabulary.


class Limits(NamedTuple):
    """The limits of one engine."""

    max_rows: int  # Maximum number of requests in one batch (max_num_seqs).
    max_model_len: int  # Maximum length of a text, in tokens.
    vocab_size: int = UNKNOWN_VOCABULARY  # The ids of draft tokens are below this number.
    max_batched_tokens: int = 1 << 62  # Maximum number of tokens per step.
    k: int = MAX_DRAFT_TOKENS  # Maximum number of draft tokens per request.


def unknown_tokens(tokens: np.ndarray, vocab_size: int) -> str:
    """Describe token ids that lie outside the vocabulary; return "" if all lie inside.

    Tokens from a disk or another engine have to be checked, because an engine would look up
    unknown ids outside its tables.
    """
    if not len(tokens) or (tokens.min() >= 0 and tokens.max() < vocab_size):
        return ""
    return f"token ids from {tokens.min()} to {tokens.max()}; the model has {vocab_size}"
