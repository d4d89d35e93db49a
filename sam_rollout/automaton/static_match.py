"""Places the rows of a batch in static automata, each row in its own, in one call.

Each row has a cursor: the state of the longest suffix of the row's text that occurs in the
automaton's text. Automata reach the kernels as addresses, because the rows' automata differ. Every
index read from them is checked, since their arrays may lie in a file that was overwritten.
"""

import numpy as np
import numpy.typing as npt
from numba import njit, types

from sam_rollout.automaton.compilation import WarmUp, compile_kernels
from sam_rollout.automaton.interface import (
    NOWHERE,
    PLACE_HEADER,
    PLACE_KIND,
    PLACE_LENGTH,
    PLACE_STATE,
    STATIC,
    Int32Array,
    Int64Array,
)
from sam_rollout.automaton.kernels import _int32_pointer
from sam_rollout.automaton.static import (
    CLONE_LENGTH,
    EDGE_START,
    EDGE_TARGET,
    EDGE_TOKEN,
    EDGES,
    HEADER_WIDTH,
    LINK,
    STATES,
    TEXT,
    TOKENS,
    VOCABULARY,
    StaticAutomaton,
)

# A cursor with more unread tokens than this starts anew with the last so many. A match of this
# length is as good as any longer one, and no call reads more than this of a row.
WINDOW = 64

# Columns of a cursor, int32[CURSOR_WIDTH].
READ = 0  # tokens of the row that it has read
STATE = 1
MATCH = 2  # length of the longest suffix that is a string of the automaton
CURSOR_WIDTH = 3

# States looked at for continuations, from a place along suffix links: some only end documents.
_MAX_STEPS_BACK = 8


class StaticMatcher:
    """Cursors of a batch of rows, each in the automaton it is attached to or in none.

    Args:
        max_rows: most rows of a batch.
    """

    def __init__(self, max_rows: int) -> None:
        warm_up()
        self._automata: list[StaticAutomaton | None] = []
        self._headers = np.zeros((max_rows, HEADER_WIDTH), np.int64)
        self._cursors = np.zeros((max_rows, CURSOR_WIDTH), np.int32)

    def rearrange(self, previous: npt.NDArray[np.integer]) -> None:
        """Row i becomes what row `previous[i]` was, or a detached one where that is negative."""
        rows = len(previous)
        self._automata = [self._automata[row] if row >= 0 else None for row in previous]
        self._headers[:rows] = np.where(previous[:, None] >= 0, self._headers[previous], 0)
        self._cursors[:rows] = self._cursors[previous]

    def attach(self, row: int, automaton: StaticAutomaton | None) -> None:
        """Match a row in another automaton from now on."""
        self._automata[row] = automaton  # keeps the arrays alive that the header points into
        self._headers[row] = 0 if automaton is None else automaton.header()
        self._cursors[row] = 0

    def automaton(self, row: int) -> StaticAutomaton | None:
        """What a row is attached to."""
        return self._automata[row]

    def place(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: npt.NDArray[np.bool_],
        out_places: Int64Array,
    ) -> None:
        """Advance the cursors; arguments as for `Source.locate`."""
        place_rows(self._headers, self._cursors, token_ids, num_tokens, eligible, out_places)


@njit(nogil=True)
def _length_of(header, state):
    """Length of the longest string of a state."""
    if state <= header[TOKENS]:
        return state
    return np.int64(_int32_pointer(header[CLONE_LENGTH])[state - header[TOKENS] - 1])


@njit(nogil=True)
def _follow(header, state, token):
    """The state that a token leads to, 0 for none."""
    if token >= header[VOCABULARY]:
        return np.int64(0)  # the separator is no token that could match
    if state < header[TOKENS] and _int32_pointer(header[TEXT])[state] == token:
        return state + 1
    starts = _int32_pointer(header[EDGE_START])
    edge_tokens = _int32_pointer(header[EDGE_TOKEN])
    low = np.int64(max(starts[state], 0))
    end = min(np.int64(starts[state + 1]), header[EDGES])
    high = end
    while low < high:
        middle = (low + high) // 2
        if edge_tokens[middle] < token:
            low = middle + 1
        else:
            high = middle
    if low >= end or edge_tokens[low] != token:
        return np.int64(0)
    target = np.int64(_int32_pointer(header[EDGE_TARGET])[low])
    return target if 0 <= target < header[STATES] else np.int64(0)


@njit(nogil=True)
def _shorter(header, state, match):
    """The suffix link of a state and its length, which is always less than `match`."""
    link = np.int64(_int32_pointer(header[LINK])[state])
    if 0 < link < header[STATES]:
        length = _length_of(header, link)
        if 0 < length < match:
            return link, length
    return np.int64(0), np.int64(0)


@njit(nogil=True)
def _advance(header, cursor, token_ids, row, length):
    """Let a cursor read its row up to `length`."""
    read, state, match = np.int64(cursor[READ]), np.int64(cursor[STATE]), np.int64(cursor[MATCH])
    if read > length or length - read > WINDOW:  # another text, or one to catch up with
        read, state, match = max(0, length - WINDOW), np.int64(0), np.int64(0)
    for position in range(read, length):
        token = token_ids[row, position]
        target = _follow(header, state, token)
        while target == 0 and state != 0:
            state, match = _shorter(header, state, match)
            target = _follow(header, state, token)
        if target != 0:
            state = target
            match += 1
    cursor[READ], cursor[STATE], cursor[MATCH] = length, state, match


@njit(nogil=True)
def place_rows(headers, cursors, token_ids, num_tokens, eligible, out_places):
    """Advance the cursor of every eligible row that has an automaton, and tell where it stands."""
    for row in range(num_tokens.size):
        header, cursor, place = headers[row], cursors[row], out_places[row]
        place[PLACE_KIND] = NOWHERE
        if header[TOKENS] == 0 or not eligible[row]:
            continue
        _advance(header, cursor, token_ids, row, min(np.int64(num_tokens[row]), token_ids.shape[1]))
        place[PLACE_KIND] = STATIC
        place[PLACE_HEADER] = np.int64(headers.ctypes.data) + row * (8 * HEADER_WIDTH)
        place[PLACE_STATE] = cursor[STATE]
        place[PLACE_LENGTH] = cursor[MATCH]


_HEADERS = types.Array(types.int64, 2, "C")
_CURSORS = types.Array(types.int32, 2, "C")
# Rows may be views with strides, and read-only: the caller's texts are never written to.
_INPUT = types.Array(types.int32, 1, "A", readonly=True)
_TOKEN_IDS = types.Array(types.int32, 2, "A", readonly=True)
_ELIGIBLE = types.Array(types.boolean, 1, "A", readonly=True)
_PLACES = types.Array(types.int64, 2, "C")


def warm_up() -> WarmUp:
    """Compile the kernels, or load them from numba's disk cache; as `kernels.warm_up`."""
    return compile_kernels(
        ((place_rows, (_HEADERS, _CURSORS, _TOKEN_IDS, _INPUT, _ELIGIBLE, _PLACES)),)
    )
