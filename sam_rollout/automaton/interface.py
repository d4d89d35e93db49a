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
# int32[PLACE_LENGTH, 2]; of DRAWN: of the row's table, int32[PLACE_LENGTH, DRAWN_WIDTH].
PLACE_HEADER = 1
# Of the text's longest suffix there; of READY: 0; of FOLLOWERS: the last token; of DRAWN: twice the
# next token's position, and 1 where it was drawn after the text's last token.
PLACE_STATE = 2
PLACE_LENGTH = 3  # of this suffix
PLACE_TEXT = 4  # of LIVE: who writes the text, see `kernels.WRITER`
PLACE_WIDTH = 5
# Kinds: nothing to draft from, an automaton, a draft made elsewhere, what follows each token, what
# was drawn for each position.
NOWHERE, LIVE, READY, FOLLOWERS, DRAWN = 0, 1, 2, 3, 4
# Columns of that table: the next token, -1 for none, and how often in a row it was that.
FOLLOWER, RUN = 0, 1
# Columns of a draft made elsewhere: the token, and how certain it was, CERTAIN at most.
DRAFT_TOKEN, CERTAINTY = 0, 1
CERTAIN = 1000
# Columns of what positions drew: the position and its token; the token that it was drawn after, how
# far behind the first wrong token of a draft that was, and how often in a row it was the same.
DRAWN_POSITION, DRAWN_TOKEN, DRAWN_AFTER, DRAWN_DISTANCE, DRAWN_AGAIN = 0, 1, 2, 3, 4
DRAWN_WIDTH = 5
