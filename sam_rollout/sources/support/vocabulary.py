"""Which token ids a model has. What comes from a disk or another engine is held to that.

A text of a model with a larger vocabulary would be drafted from like any other, and an engine that
verifies such a draft looks its ids up beyond the ends of its tables.
"""

from __future__ import annotations

import logging
from pathlib import Path

from sam_rollout.automaton.interface import Int32Array

logger = logging.getLogger(__name__)


def is_known(tokens: Int32Array, vocab_size: int) -> bool:
    """Whether a model with so many tokens has all of these."""
    return not len(tokens) or bool(tokens.min() >= 0 and tokens.max() < vocab_size)


class TextCheck:
    """Tells which texts of a folder can be drafted from; counts the others, and names the first.

    Args:
        folder: where the texts lie.
        vocab_size: tokens of the model.

    Attributes:
        refused: texts that cannot be drafted from, and segments whose rest cannot be read.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._named: set[str] = set()  # what is wrong
        self.refused = 0

    def passes(self, tokens: Int32Array) -> bool:
        """Whether the model has the text's token ids."""
        if is_known(tokens, self._vocab_size):
            return True
        ids = f"token ids from {tokens.min()} to {tokens.max()}, the model has {self._vocab_size}"
        self._refuse("another model wrote them", f"hold {ids}")
        return False

    def damaged(self, segment: str) -> None:
        """Something in a segment is no text that this version wrote."""
        self._refuse("torn by a crash or of another version", f"file {segment}, are damaged")

    def _refuse(self, why: str, what: str) -> None:
        self.refused += 1
        if why not in self._named:
            logger.warning(
                "Texts in %s %s: %s. They are dropped, drafting goes on; others are counted "
                "(sam/draft/refused_texts).",
                self._folder, what, why,
            )  # fmt: skip
        self._named.add(why)
