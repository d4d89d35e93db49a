"""The compiled half of the automaton: what has to run once per token, for all rows in one call.

The structure is the online suffix automaton of Blumer et al. (1985), used for drafting as in
SAM-Decoding (arXiv 2411.10666), in a layout made for text that is read once and left to right:

* State i >= 0 is the prefix of length i. Its edge to state i + 1 on text[i], its length and its
  first end position are therefore implicit; only branching edges are stored.
* State -1 - j is the j-th clone. Prefixes and clones lie in one array on both sides of an
  origin, so that a state's id is its offset and no lookup has to ask which kind it has.
* Branching edges live in one open-addressing table keyed by (state, token); the edges of one
  state are also chained, because cloning a state copies them all.
* Suffix links always lead to shorter strings and end in state 0, the empty string. The link of
  the newest prefix is the longest suffix of the text that occurred before: the match to draft
  from needs no cursor of its own.

Buffers belong to Python (`pool.py`) and reach the kernels as addresses in an int64 header per
automaton, because numba can take neither a list of arrays of changing number nor grow one. In
what follows `table` is int64[slots, HEADER_WIDTH], `header` one row of it, `states` and `edges`
are int32 pointers into one automaton's buffers, and `progress` is int64[PROGRESS_WIDTH].

All kernels share this file on purpose: what is cached on disk (`compilation.py`) depends on the
content of the file that defines the kernel, and on nothing it calls elsewhere.
"""

import numpy as np
from numba import njit, types, uint32, uint64
from numba.extending import intrinsic

from sam_rollout.automaton.compilation import WarmUp, compile_kernels

# Columns of the header table, int64[slots, HEADER_WIDTH].
OPEN = 0  # 1 while the slot is in use
STATES = 1  # address of the row of state 0
EDGES = 2  # address of the edge table
TOKEN_CAPACITY = 3  # longest text the states array holds
CLONE_CAPACITY = 4
EDGE_CAPACITY = 5  # slots of the edge table
LENGTH = 6  # tokens read
CLONES = 7
EDGE_COUNT = 8
MATCH_LENGTH = 9
MATCH_END = 10
HEADER_WIDTH = 11

# Columns of a state, int32[4]: 16 bytes, a quarter of a cache line.
NEXT_TOKEN = 0  # of a prefix: the token of its implicit edge
CLONE_LENGTH = 0  # of a clone: length of its longest string
LINK = 1
LATEST = 2  # a late (see `_append`) end position of the state's strings
FIRST_EDGE = 3  # 1 + slot of its first branching edge, 0 for none

# Columns of an edge, int32[4]. No edge leads to state 0: TARGET 0 marks a free slot.
SOURCE = 0
TOKEN = 1
TARGET = 2
NEXT_EDGE = 3  # 1 + slot of the next edge of the same state, 0 for none

WIDTH = 4  # of a state and of an edge

# Why a kernel stopped before its last row.
DONE = 0
NEED_TOKENS = 1
NEED_CLONES = 2
NEED_EDGES = 3
NEGATIVE_TOKEN = 4
BAD_SLOT = 5
BAD_ROW = 6

# Columns of the int64 array a kernel reports through.
REASON = 0
APPENDED = 1
REBUILDS = 2
PROGRESS_WIDTH = 3

# Tokens at the end of the read text that are compared with the row before reading on.
GUARD_TOKENS = 8


@intrinsic
def _int32_pointer(typing_context, address):
    """The int32 pointer at an integer address. Pointers, unlike arrays, take negative indices."""
    signature = types.CPointer(types.int32)(types.int64)

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return signature, generate


@njit(nogil=True)
def _length_of(states, state):
    """Length of the longest string of a state."""
    return state if state >= 0 else states[WIDTH * state + CLONE_LENGTH]


@njit(nogil=True)
def _find_edge(edges, capacity, state, token):
    """Slot of a branching edge, or -1 - the slot where it belongs if there is none."""
    key = (uint64(uint32(state)) << uint64(32)) | uint64(uint32(token))
    # A multiplication alone maps runs of states with one token onto few slots; mixing the high
    # half back in before a second one (as in splitmix64) keeps such text at ordinary probe counts.
    key *= uint64(0x9E3779B97F4A7C15)
    key ^= key >> uint64(32)
    key *= uint64(0xBF58476D1CE4E5B9)
    slot = np.int64(((key >> uint64(32)) * uint64(capacity)) >> uint64(32))
    while edges[WIDTH * slot + TARGET] != 0:
        if edges[WIDTH * slot + SOURCE] == state and edges[WIDTH * slot + TOKEN] == token:
            return slot
        slot += 1
        if slot == capacity:
            slot = 0
    return -1 - slot


@njit(nogil=True)
def _put_edge(states, edges, slot, state, token, target):
    """Store an edge in a free slot and chain it to its state."""
    edges[WIDTH * slot + SOURCE] = state
    edges[WIDTH * slot + TOKEN] = token
    edges[WIDTH * slot + TARGET] = target
    edges[WIDTH * slot + NEXT_EDGE] = states[WIDTH * state + FIRST_EDGE]
    states[WIDTH * state + FIRST_EDGE] = slot + 1


@njit(nogil=True)
def _edge_room(header):
    """Edges that may still be added: four fifths full costs no measurable time."""
    return header[EDGE_CAPACITY] * 4 // 5 - header[EDGE_COUNT]


@njit(nogil=True)
def _clone(header, states, edges, parent, token, state):
    """Split off the strings of `state` that extend `parent`; return the clone, or 0 and why not.

    The clone is what the new prefix shares with earlier text, so it inherits the latest end
    position of the state it is split from.
    """
    out_edges = 1 if state >= 0 else 0
    at = states[WIDTH * state + FIRST_EDGE]
    while at:
        out_edges += 1
        at = edges[WIDTH * (at - 1) + NEXT_EDGE]
    if header[CLONES] == header[CLONE_CAPACITY]:
        return np.int64(0), NEED_CLONES
    if _edge_room(header) < out_edges:
        return np.int64(0), NEED_EDGES
    header[CLONES] += 1
    header[EDGE_COUNT] += out_edges
    clone = -header[CLONES]
    states[WIDTH * clone + CLONE_LENGTH] = _length_of(states, parent) + 1
    states[WIDTH * clone + LINK] = states[WIDTH * state + LINK]
    states[WIDTH * clone + LATEST] = states[WIDTH * state + LATEST]
    states[WIDTH * clone + FIRST_EDGE] = 0
    if state >= 0:
        implicit = states[WIDTH * state + NEXT_TOKEN]
        slot = -1 - _find_edge(edges, header[EDGE_CAPACITY], clone, implicit)
        _put_edge(states, edges, slot, clone, implicit, state + 1)
    at = states[WIDTH * state + FIRST_EDGE]
    while at:
        copied = edges[WIDTH * (at - 1) + TOKEN]
        target = edges[WIDTH * (at - 1) + TARGET]
        at = edges[WIDTH * (at - 1) + NEXT_EDGE]
        slot = -1 - _find_edge(edges, header[EDGE_CAPACITY], clone, copied)
        _put_edge(states, edges, slot, clone, copied, target)
    states[WIDTH * state + LINK] = clone
    while True:  # lead the shorter contexts of the token to the clone
        slot = _find_edge(edges, header[EDGE_CAPACITY], parent, token)
        if slot < 0 or edges[WIDTH * slot + TARGET] != state:
            break
        edges[WIDTH * slot + TARGET] = clone
        if parent == 0:
            break
        parent = states[WIDTH * parent + LINK]
    return clone, DONE


@njit(nogil=True)
def _link_of_next(header, states, edges, token):
    """Give every suffix of the text its edge on `token`; return the new prefix's suffix link.

    Stops with a reason when an array is full. The walk may then be repeated from its start once
    there is room: edges that lead to the new prefix already are passed over.
    """
    last = header[LENGTH]
    state = np.int64(last)
    while state != 0:
        state = np.int64(states[WIDTH * state + LINK])
        if state >= 0 and states[WIDTH * state + NEXT_TOKEN] == token:
            return state + 1, DONE  # an implicit edge joins neighbours: nothing to split
        slot = _find_edge(edges, header[EDGE_CAPACITY], state, token)
        if slot >= 0:
            target = np.int64(edges[WIDTH * slot + TARGET])
            if target == last + 1:
                continue
            if _length_of(states, target) == _length_of(states, state) + 1:
                return target, DONE
            return _clone(header, states, edges, state, token, target)
        if _edge_room(header) < 1:
            return np.int64(0), NEED_EDGES
        header[EDGE_COUNT] += 1
        _put_edge(states, edges, -1 - slot, state, token, last + 1)
    return np.int64(0), DONE


@njit(nogil=True)
def _append(header, states, edges, token, max_link_updates):
    """Read one token; return DONE or what there is no room for (nothing is read then).

    The new end position is noted at no more than `max_link_updates` suffix links. Without that
    bound a run of one token costs its length at every step; with it, states far down the chain
    keep an end position that is true but may not be the latest.
    """
    last = header[LENGTH]
    new = last + 1
    if new > header[TOKEN_CAPACITY]:
        return NEED_TOKENS
    states[WIDTH * last + NEXT_TOKEN] = token
    states[WIDTH * new + FIRST_EDGE] = 0
    link, reason = _link_of_next(header, states, edges, token)
    if reason != DONE:
        return reason
    states[WIDTH * new + LINK] = link
    states[WIDTH * new + LATEST] = new
    header[LENGTH] = new
    header[MATCH_LENGTH] = _length_of(states, link)
    header[MATCH_END] = states[WIDTH * link + LATEST] if link != 0 else 0
    for _ in range(max_link_updates):
        if link == 0:
            break
        states[WIDTH * link + LATEST] = new
        link = np.int64(states[WIDTH * link + LINK])
    return DONE


@njit(nogil=True)
def _text_changed(header, states, token_ids, row, length):
    """Whether the row cannot be a continuation of the text read so far.

    A request id may be reused, or its text cut, between two calls. Comparing everything would
    cost as much as drafting does; a shorter row or a difference in the last few tokens (one or
    two cache lines) finds practically every such row, and one that slips through costs
    acceptance, never correctness, since drafts are verified.
    """
    read = header[LENGTH]
    if length < read:
        return True
    for position in range(max(0, read - GUARD_TOKENS), read):
        if states[WIDTH * position + NEXT_TOKEN] != token_ids[row, position]:
            return True
    return False


@njit(nogil=True)
def _clear(header, states, edges):
    """Forget the text, keep the buffers."""
    for field in (LENGTH, CLONES, EDGE_COUNT, MATCH_LENGTH, MATCH_END):
        header[field] = 0
    for i in range(WIDTH * header[EDGE_CAPACITY]):
        edges[i] = 0
    states[FIRST_EDGE] = 0


@njit(nogil=True)
def _catch_up(table, slot, token_ids, row, length, max_link_updates, progress):
    """Read a row's tokens from where the automaton stands up to `length`; return why it stopped."""
    if slot >= table.shape[0] or table[slot, OPEN] == 0:
        return BAD_SLOT
    if row < 0 or row >= token_ids.shape[0] or length < 0 or length > token_ids.shape[1]:
        return BAD_ROW
    header = table[slot]
    states = _int32_pointer(header[STATES])
    edges = _int32_pointer(header[EDGES])
    if _text_changed(header, states, token_ids, row, length):
        _clear(header, states, edges)
        progress[REBUILDS] += 1
    while header[LENGTH] < length:
        token = token_ids[row, header[LENGTH]]
        if token < 0:
            return NEGATIVE_TOKEN
        reason = _append(header, states, edges, token, max_link_updates)
        if reason != DONE:
            return reason
        progress[APPENDED] += 1
    return DONE


@njit(nogil=True)
def _draft(header, k, out_tokens, i):
    """Copy what followed the match into `out_tokens[i]`; return how many tokens that is.

    A copy that reaches the end of the text goes on with the draft itself, as periodic text does.
    The match ends before the text does, so there is always a first token to copy.
    """
    if header[MATCH_LENGTH] == 0 or k <= 0:
        return 0
    states = _int32_pointer(header[STATES])
    end = header[MATCH_END]
    available = header[LENGTH] - end
    k = min(k, out_tokens.shape[1])
    for j in range(k):
        if j < available:
            out_tokens[i, j] = states[WIDTH * (end + j) + NEXT_TOKEN]
        else:
            out_tokens[i, j] = out_tokens[i, j - available]
    return k


@njit(nogil=True)
def extend_rows(table, slots, rows, token_ids, lengths, max_link_updates, first, progress):
    """Catch rows `first`, ... up; return the row it stopped at, `slots.size` when all are done."""
    for i in range(first, slots.size):
        if slots[i] < 0:
            continue
        progress[REASON] = _catch_up(
            table, slots[i], token_ids, rows[i], lengths[i], max_link_updates, progress
        )
        if progress[REASON] != DONE:
            return i
    return slots.size


@njit(nogil=True)
def extend_and_draft_rows(
    table, slots, rows, token_ids, lengths, max_link_updates, first, progress,
    k, out_tokens, out_counts,
):  # fmt: skip
    """`extend_rows`, drafting up to `k[i]` tokens for each row while its automaton is in cache."""
    for i in range(first, slots.size):
        out_counts[i] = 0
        if slots[i] < 0:
            continue
        progress[REASON] = _catch_up(
            table, slots[i], token_ids, rows[i], lengths[i], max_link_updates, progress
        )
        if progress[REASON] != DONE:
            return i
        out_counts[i] = _draft(table[slots[i]], k[i], out_tokens, i)
    return slots.size


@njit(nogil=True)
def move_edges(header, new_address, new_capacity):
    """Rehash the edges into a larger zeroed table and make it the automaton's own."""
    states = _int32_pointer(header[STATES])
    old = _int32_pointer(header[EDGES])
    new = _int32_pointer(new_address)
    for slot in range(header[EDGE_CAPACITY]):
        if old[WIDTH * slot + TARGET] != 0:
            states[WIDTH * old[WIDTH * slot + SOURCE] + FIRST_EDGE] = 0
    for slot in range(header[EDGE_CAPACITY]):
        target = old[WIDTH * slot + TARGET]
        if target != 0:
            state = old[WIDTH * slot + SOURCE]
            token = old[WIDTH * slot + TOKEN]
            free = -1 - _find_edge(new, new_capacity, state, token)
            _put_edge(states, new, free, state, token, target)
    header[EDGES] = new_address
    header[EDGE_CAPACITY] = new_capacity


_TABLE = types.Array(types.int64, 2, "C")
_HEADER = types.Array(types.int64, 1, "C")
# Inputs may be views with strides, and read-only: the caller's arrays are never written to.
_INPUT = types.Array(types.int32, 1, "A", readonly=True)
_TOKEN_IDS = types.Array(types.int32, 2, "A", readonly=True)
_EXTEND = (
    _TABLE, _INPUT, _INPUT, _TOKEN_IDS, _INPUT, types.int64, types.int64, _HEADER,
)  # fmt: skip
_OUTPUT = (_INPUT, types.Array(types.int32, 2, "C"), types.Array(types.int32, 1, "C"))


def warm_up() -> WarmUp:
    """Compile the kernels, or load them from numba's disk cache, and forbid compiling later.

    Takes seconds the first time on a machine and about one afterwards. It is called when a
    pool is made, so that no engine step ever waits for the compiler. The cache lies beside this
    file or, where that is read-only, in numba's user-wide folder or NUMBA_CACHE_DIR; where none of
    them can be used, every process compiles for itself.
    """
    return compile_kernels(
        (
            (extend_rows, _EXTEND),
            (extend_and_draft_rows, _EXTEND + _OUTPUT),
            (move_edges, (_HEADER, types.int64, types.int64)),
        )
    )
