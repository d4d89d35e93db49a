"""The check that token ids from a disk or another engine are in the model's vocabulary.

Without it, a text of a model with a larger vocabulary would be drafted from like any other, and the
engine that verifies such a draft would look its ids up beyond the ends of its tables.
"""

from __future__ import annotations

import logging
from pathlib import Path

from sam_rollout.automaton.interface import Int32Array

logger = logging.getLogger(__name__)


def is_known(tokens: Int32Array, vocab_size: int) -> bool:
    """Whether all tokens are in a vocabulary of `vocab_size` tokens."""
    return not len(tokens) or bool(tokens.min() >= 0 and tokens.max() < vocab_size)


class TextCheck:
    """Decides which texts of a folder can be drafted from, and counts and logs the others.

    Args:
        folder: the texts' folder, for log messages.
        vocab_size: number of tokens in the model's vocabulary.

    Attributes:
        refused: number of texts that cannot be drafted from, and of segments whose rest cannot be
            read.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._named: set[str] = set()  # kinds of faults that were logged
        self.refused = 0

    def passes(self, tokens: Int32Array) -> bool:
        """Whether the model has the text's token ids."""
        if is_known(tokens, self._vocab_size):
            return True
        ids = f"token ids from {tokens.min()} to {tokens.max()}, the model has {self._vocab_size}"
        self._refuse("another model wrote them", f"hold {ids}")
        return False

    def damaged(self, segment: str) -> None:
        """Count a segment with something that this version did not write."""
        self._refuse("torn by a crash or of another version", f"file {segment}, are damaged")

    def _refuse(self, why: str, what: str) -> None:
        self.refused += 1
        if why not in self._named:
            logger.warning(
                "Texts in %s %s: %s. They are dropped and drafting goes on. Further ones are only "
                "counted (sam/draft/refused_texts).",
                self._folder, what, why,
            )  # fmt: skip
        self._named.add(why)
