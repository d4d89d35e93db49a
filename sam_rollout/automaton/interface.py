"""Constants and types that kernels share with their callers; importing them compiles nothing."""

from typing import Any

import numpy as np
import numpy.typing as npt

BoolArray = npt.NDArray[np.bool_]
Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

COUNT_SHIFT = 24  # in `kernels.LATEST`, the bits below this one hold a position, the others a count
LARGEST_AUTOMATON = 1 << COUNT_SHIFT  # maximum size in tokens; a text fills whole blocks
BLOCK_SHIFT = 9  # a block holds 2**9 prefixes or edges


def places_of(tokens: int | Int64Array) -> Any:
    """Return a text's size in an automaton, in tokens: its length, rounded up to whole blocks."""
    return -(-tokens >> BLOCK_SHIFT) << BLOCK_SHIFT


class AutomatonFullError(ValueError):
    """An automaton can hold no more tokens; `automaton` is its number."""

    def __init__(self, automaton: int) -> None:
        super().__init__(f"automaton {automaton} holds no more than {LARGEST_AUTOMATON} tokens")
        self.automaton = automaton


# A place, int64[PLACE_WIDTH], is a point in a source's texts, from which a row drafts. Columns:
#
#             PLACE_HEADER, an address        PLACE_STATE                         PLACE_LENGTH
# LIVE        the automaton's header          the longest known suffix's state    its length
# READY       the draft, int32[length, 2]     0                                   the draft's length
# FOLLOWERS   the table, int32[length, 2]     the text's last token               the table's rows
# DRAWN       the row's table,                twice the next token's position,    the table's rows
#             int32[length, DRAWN_WIDTH]      plus 1 if the token drawn there
#                                             followed the text's last token
PLACE_KIND = 0
PLACE_HEADER = 1
PLACE_STATE = 2
PLACE_LENGTH = 3
PLACE_TEXT = 4  # LIVE only: the text's writer, see `kernels.WRITER`
PLACE_WIDTH = 5
# Values of PLACE_KIND. A row drafts from nothing, from an automaton, from a draft made elsewhere,
# from a table of each token's likeliest follower, or from a table of draws by position.
NOWHERE, LIVE, READY, FOLLOWERS, DRAWN = 0, 1, 2, 3, 4
# Columns of the table of followers: a token's likeliest next token (-1 if unknown), and how many
# times in a row the model has found it likeliest after this token.
FOLLOWER, RUN = 0, 1
# Columns of a draft made elsewhere: the token, and how certain it is, from 0 to CERTAIN.
DRAFT_TOKEN, CERTAINTY = 0, 1
CERTAIN = 1000
# Columns of the table of draws: the position, the token drawn there, the token before it, the
# position's distance from the draft's first wrong token, and how many times in a row this token was
# drawn there.
DRAWN_POSITION, DRAWN_TOKEN, DRAWN_AFTER, DRAWN_DISTANCE, DRAWN_AGAIN = 0, 1, 2, 3, 4
DRAWN_WIDTH = 5


def write_places(out_places: Int64Array, kind: Any, header: Any, state: Any, length: Any) -> None:
    """Write all columns of places except PLACE_TEXT; each value is an int or int[rows]."""
    out_places[:, PLACE_KIND] = kind
    out_places[:, PLACE_HEADER] = header
    out_places[:, PLACE_STATE] = state
    out_places[:, PLACE_LENGTH] = length
