"""What kernels share with those who call automata; nothing is compiled to import this."""

from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

COUNT_SHIFT = 24  # bits of a position; the bits above hold a count
LARGEST_AUTOMATON = 1 << COUNT_SHIFT  # most places of an automaton
BLOCK_SHIFT = 9  # bits of a place in its block


def places_of(tokens: int | Int64Array) -> Any:
    """Places that a text takes in an automaton: whole blocks of them, however short it is."""
    return -(-tokens >> BLOCK_SHIFT) << BLOCK_SHIFT


class AutomatonFullError(ValueError):
    """An automaton can hold no more tokens; `automaton` is its number."""

    def __init__(self, message: str, automaton: int) -> None:
        super().__init__(message)
        self.automaton = automaton


# Columns of where a text stands in a source, int64[PLACE_WIDTH].
PLACE_KIND = 0
# Address: of the automaton's header; of READY: of the draft, of FOLLOWERS: of the table, both
# int32[PLACE_LENGTH, 2].
PLACE_HEADER = 1
PLACE_STATE = 2  # of the text's longest suffix there; of READY: 0; of FOLLOWERS: the last token
PLACE_LENGTH = 3  # of this suffix
PLACE_TEXT = 4  # of LIVE: who writes the text, see `kernels.WRITER`
PLACE_WIDTH = 5
# Kinds: nothing to draft from, an automaton, a draft made elsewhere, what follows each token.
NOWHERE, LIVE, READY, FOLLOWERS = 0, 1, 2, 3
# Columns of that table: the next token, -1 for none, and how often in a row it was that.
FOLLOWER, RUN = 0, 1
# Columns of a draft made elsewhere: the token, and how certain it was, CERTAIN at most.
DRAFT_TOKEN, CERTAINTY = 0, 1
CERTAIN = 1000
