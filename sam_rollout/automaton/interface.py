"""What kernels share with those who call automata; nothing is compiled to import this."""

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

COUNT_SHIFT = 24  # bits of a position; the bits above hold a count
LARGEST_AUTOMATON = 1 << COUNT_SHIFT  # most tokens of an automaton's texts


class AutomatonFullError(ValueError):
    """An automaton can hold no more tokens; `automaton` is its number."""

    def __init__(self, message: str, automaton: int) -> None:
        super().__init__(message)
        self.automaton = automaton


# Columns of a match, int32[MATCH_WIDTH].
MATCH_LENGTH = 0
MATCH_END = 1  # the prefix whose continuation to draft
MATCH_BRANCHES = 2  # tokens that have followed the match, counted up to a limit
MATCH_DISTANCE = 3  # tokens from there to the text's end, both taken as positions in their texts
MATCH_STATE = 4
# 1 if the continuation was seen more than once: in a text's own automaton, it followed the match
# twice in a row; in a shared one, texts were noted to continue from the match more than once.
MATCH_CONFIRMED = 5
MATCH_WIDTH = 6
