"""Which token ids a model has. What comes from a disk or another engine is held to that.

A text of a model with a larger vocabulary would be drafted from like any other, and an engine that
verifies such a draft looks its ids up beyond the ends of its tables.
"""

from __future__ import annotations

import logging
from pathlib import Path

from sam_rollout.automaton.interface import Int32Array

logger = logging.getLogger(__name__)

_COUNTED = "They are dropped, drafting goes on; others are counted (sam/draft/refused_texts)."


def is_known(tokens: Int32Array, vocab_size: int) -> bool:
    """Whether a model with so many tokens has all of these."""
    return not len(tokens) or bool(tokens.min() >= 0 and tokens.max() < vocab_size)


class TextCheck:
    """Tells which texts of a folder can be drafted from; counts the others, and names them once.

    Args:
        folder: where the texts lie.
        vocab_size: tokens of the model.

    Attributes:
        refused: texts that cannot be drafted from, and segments whose rest cannot be read.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._foreign = 0
        self._ids: list[int] = []  # lowest and largest of each foreign text, until they are told
        self._has_told = self._has_told_damage = False
        self.refused = 0

    def passes(self, tokens: Int32Array) -> bool:
        """Whether the model has the text's token ids; `tell` says so of those that it has not."""
        if is_known(tokens, self._vocab_size):
            return True
        self.refused += 1
        if not self._has_told:
            self._foreign += 1
            self._ids += [int(tokens.min()), int(tokens.max())]
        return False

    def tell(self) -> None:
        """After some texts: say what did not pass, the first time that something did not."""
        if not self._ids:
            return
        logger.warning(
            "Texts in %s (%d so far) hold token ids from %d to %d, the model has %d: another "
            "model wrote them. %s",
            self._folder, self._foreign, min(self._ids), max(self._ids), self._vocab_size, _COUNTED,
        )  # fmt: skip
        self._has_told = True
        self._ids.clear()

    def damaged(self, segment: str) -> None:
        """Something in a segment is no text that this version wrote."""
        self.refused += 1
        if not self._has_told_damage:
            logger.warning(
                "Texts in %s, file %s, are damaged, torn by a crash or of another version. %s",
                self._folder, segment, _COUNTED,
            )  # fmt: skip
        self._has_told_damage = True
