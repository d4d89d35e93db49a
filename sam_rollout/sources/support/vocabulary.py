"""Checks that token ids from a disk or another engine are in the model's vocabulary.

An engine would look other ids up beyond the ends of its tables.
"""

from __future__ import annotations

from sam_rollout.automaton.interface import Int32Array


def is_known(tokens: Int32Array, vocab_size: int) -> bool:
    """Whether all tokens are in a vocabulary of `vocab_size` tokens."""
    return not len(tokens) or bool(tokens.min() >= 0 and tokens.max() < vocab_size)
