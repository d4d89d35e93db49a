"""Compiled kernels of the automaton: one call reads the new tokens of all rows of a batch.

The structure is the online suffix automaton of Blumer et al. (1985), generalised to several texts
that grow in turns, and used for drafting as in SAM-Decoding (arXiv 2411.10666):

* A state s >= 0 is a prefix of a text. A text's prefixes lie in order in a sequence of blocks,
  called a run. A prefix's index in the run gives the prefix's length, and thus the position where
  it ends. For the edge to the run's next prefix, only the token is stored. All other edges are
  called branching, and are stored as a whole.
* A clone is a state that was split off another state. It has a negative number. Its entry is one
  cache line, as large as the entries of four prefixes, and holds up to three branching edges.
* All other branching edges are in one open-addressing table keyed by (state, token). A state's
  edges in the table form a linked list: each edge stores the token of the next one. So all edges of
  a state can be found and copied when the state is cloned.
* Suffix links always lead to shorter strings and end in state 0, the empty string. A text's current
  state is its newest prefix, whose link leads to the text's longest suffix that occurred before.
* Two texts share the states of their common beginning. Where the texts differ, the later one begins
  its own run. The first entry of this run only stores the run's first token, because the entry of a
  state names the token that follows the state.

A state also notes how often its strings were continued, and at which prefix one of its strings was
last continued. A clone also notes the latest and the most frequent token that continued it, with
the states that these tokens lead to. A block of a run notes which text wrote it. Notes are made
when a text adds a state, along a bounded number of suffix links. The votes for a draft's next token
are read from these notes (`continuations.py`).

An example shows the arrays of an automaton of one text, after it has read "a b c b a b". Letters
stand for the tokens 0, 1 and 2. Below the run are the suffix links of its states::

    run    0 --a--> 1 --b--> 2 --c--> 3 --b--> 4 --a--> 5 --b--> 6
    link            0       -4        0       -4        1        2

    state  string  NEXT_TOKEN  LINK  LATEST  COUNT  FIRST_EDGE
        0                   a     0       0      1           c
        1  a                b     0       5      2           -
        2  ab               c    -4       2      1           -
        3  abc              b     0       3      1           -
        4  abcb             a    -4       4      1           -
        5  abcba            b     1       5      1           -
        6  abcbab           -     2       6      0           -

    clone  string  CLONE_LENGTH  LINK  LATEST  COUNT  FIRST_EDGE  OWN_EDGES
       -4  b                  1     0       4      2           -  c to 3, a to 5

    clone  latest edge  most frequent edge  BEST_COUNT
       -4       a to 5              a to 5           1

    slot of the edge table  SOURCE  TOKEN  TARGET  NEXT_EDGE
                        89       0      c       3          b
                       276       0      b      -4          -

    text   LAST 6  LENGTH 6
    votes  c after ab  a after b

COUNT is in the upper bits of a prefix's LATEST, and in a clone's CLONE_COUNT. The clone was made
when the second b was read. It stands for "b", the suffix that "ab" and "abcb" share. Nothing has
followed prefix 6 yet. Its link leads to "ab", which was followed once: by the c after prefix 2.

States and edges lie in blocks of equal size from an arena. Directories hold the blocks' addresses.
When the edge table is full, its edges move to a larger table, in the order of their hashes. They
move gradually: a few slots for each token that is read. The frontier is the first slot of the old
table that has not moved yet.

Memory reaches the kernels as addresses, because numba accepts no list of a varying number of
arrays. In the functions below, `automata` is int64[automata, AUTOMATON_WIDTH], and `header` is one
of its rows. `texts` is int64[texts, TEXT_WIDTH]. `arena`, int64[1 + blocks], holds the number of
free blocks, and then their addresses.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from sam_rollout.automaton import compilation, interface
from sam_rollout.automaton.compilation import GIVEN_INT32, GIVEN_INT32_2D, INT64, INT64_2D, kernel
from sam_rollout.automaton.interface import BLOCK_SHIFT, COUNT_SHIFT

# Columns of an automaton's header.
OPEN = 0  # 1 while in use
SHARED = 1  # 1 if the automaton outlives its texts
STATES = 2  # address of the directory row of block 0; the rows of clones' blocks lie before it
PREFIX_BLOCKS = 3
PREFIX_BLOCK_ROOM = 4  # blocks of prefixes that the directory has room for
CLONES = 5  # number of places that clones take: CLONE_PLACES per clone (a prefix takes one)
CLONE_BLOCK_ROOM = 6
EDGES = 7  # address of the directory of the edge table
EDGE_SLOTS = 8  # slots of the edge table, a multiple of the block size; 0 before the first edge
EDGE_BLOCKS = 9  # blocks that the edge table has so far; more are added while edges move into it
EDGE_COUNT = 10
OLD_EDGES = 11  # address of the directory of the old edge table, which edges are moved out of
OLD_EDGE_SLOTS = 12  # slots of the old edge table, 0 if there is none
FRONTIER = 13  # slots of the old edge table that were moved
EDGES_BEFORE = 14  # EDGE_COUNT when the move began
AUTOMATON_WIDTH = 15

# Columns of a text.
TEXT_OPEN = 0
AUTOMATON = 1
LAST = 2  # state of the text read so far
LENGTH = 3  # tokens read
PENDING = 4  # state that was begun when memory ran out, otherwise 0
TEXT_WRITER = 5  # the text's number; the bits from GROUP_SHIFT on hold its group's number
GUARD = 6  # the last GUARD_TOKENS tokens, by position modulo GUARD_TOKENS
GUARD_TOKENS = 8
TEXT_WIDTH = GUARD + GUARD_TOKENS

# Columns of a directory row, int64[4], which describes a block of states.
ADDRESS = 0  # the block's address minus the offset of its first state (state * ENTRY_BYTES)
LENGTH_OFFSET = 1  # a prefix's length minus its number
NEXT_BLOCK = 2  # first state of the run's next block, 0 if there is none yet
WRITER = 3  # TEXT_WRITER of the text whose prefixes the block holds
DIRECTORY_WIDTH = 4

# Columns of a state, int32[4], a quarter of a cache line. A clone has four times as many columns.
NEXT_TOKEN = 0  # token of a prefix's edge to the run's next prefix, NONE at the run's end
CLONE_LENGTH = 0  # length of a clone's longest string
LINK = 1
# The latest prefix that ends with the state's strings and was continued (see `_note`). Before the
# first continuation, it is the prefix in which the strings were first read. If the state is a
# prefix, the bits from COUNT_SHIFT on count its continuations, up to LARGEST_COUNT.
LATEST = 2
FIRST_EDGE = 3  # token of the state's newest edge in the edge table, NONE without such an edge
# Further columns of a clone: the number of its continuations, the edge that was followed last, the
# edge that was followed most often (and how often), and up to three edges that are not in the edge
# table. A missing edge is stored as NONE and 0.
CLONE_COUNT = 4
LATEST_TOKEN = 5
LATEST_TARGET = 6
BEST_TOKEN = 7
BEST_TARGET = 8
BEST_COUNT = 9
OWN_EDGES = 10
CLONE_EDGES = 3
CLONE_PLACES = 4
# The columns in which a clone holds its edges' tokens; an edge's target is in the next column.
OWN_EDGE_COLUMNS = tuple(range(OWN_EDGES, OWN_EDGES + 2 * CLONE_EDGES, 2))

# Columns of an edge, int32[4]. No edge leads to state 0, so TARGET 0 marks a free slot.
SOURCE = 0
TOKEN = 1
TARGET = 2
NEXT_EDGE = 3  # token of the next edge of the same state, NONE if there is none

PREFIX_MASK = (1 << COUNT_SHIFT) - 1
LARGEST_COUNT = (1 << (31 - COUNT_SHIFT)) - 1

GROUP_SHIFT = 32
NONE = -1
ENTRY_BYTES = 16  # bytes of a prefix or an edge
BLOCK_ENTRIES = 1 << BLOCK_SHIFT
BLOCK_BYTES = BLOCK_ENTRIES * ENTRY_BYTES
BLOCK_MASK = BLOCK_ENTRIES - 1

# No edge is hashed to a table's last OVERFLOW_SLOTS slots, which take displaced edges. At a table's
# highest load, all these slots are taken with a probability of about exp(-0.35 * OVERFLOW_SLOTS).
OVERFLOW_SLOTS = 96
# While edges move to a larger table, this number of slots is moved for each token that is read.
MOVED_SLOTS = 32
# Maximum number of blocks of prefixes in an automaton; LATEST has no bits for more.
MOST_PREFIX_BLOCKS = (1 << COUNT_SHIFT) >> BLOCK_SHIFT
# Numbers for `_scout`: rows at a time, tokens per row, suffix links per token.
ROWS_SCOUTED = 32
TOKENS_SCOUTED = 3
LINKS_SCOUTED = 8
SCOUT_COLUMNS = 11  # arrays in the scratch space of `_scout`
SCOUT_LANES = ROWS_SCOUTED * (TOKENS_SCOUTED + 1)
NO_STATE = 1 << 32
# Maximum number of blocks that one token needs: two for states, the others for moved edges.
BLOCKS_PER_TOKEN = 8

# Reasons why a kernel stopped.
DONE = 0
NEED_BLOCKS = 1
NEED_DIRECTORY = 2
NEED_EDGES = 3
NEGATIVE_TOKEN = 4
BAD_SLOT = 5
BAD_ROW = 6
TOO_LONG = 7

# Columns of the int64 array in which `extend_rows` reports its progress.
REASON = 0
APPENDED = 1
REBUILDS = 2
PROGRESS_WIDTH = 3


# The decorator of small helpers. They are compiled into their callers, because a call would take
# more time than the helper's work.
_inlined = njit(nogil=True, forceinline=True)


def _pointer_to(element):
    """Make an intrinsic that turns an address into a pointer; pointers take negative indices."""

    @intrinsic
    def pointer(typing_context, address):
        signature = types.CPointer(element)(types.int64)

        def generate(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return signature, generate

    return pointer


_int32_pointer = _pointer_to(types.int32)
_int64_pointer = _pointer_to(types.int64)


@_inlined
def _pointer_of(array):
    """Return a pointer to an array of int64; a pointer takes one register, an array takes ten."""
    return _int64_pointer(np.int64(array.ctypes.data))


@_inlined
def _address_of_row(table, row):
    return np.int64(table.ctypes.data) + row * (8 * table.shape[1])


@_inlined
def _pointer_of_row(table, row):
    return _int64_pointer(_address_of_row(table, row))


@intrinsic
def _prefetch(typing_context, address):
    """Request the cache line of an address, without waiting for it."""
    signature = types.void(types.int64)

    def generate(context, builder, signature, args):
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # Arguments of llvm.prefetch: 0 to read, 3 for the caches nearest to the core, 1 for data.
        hints = [number(0), number(3), number(1)]
        builder.call(function, [builder.inttoptr(args[0], byte), *hints])
        return context.get_dummy_value()

    return signature, generate


# --- memory -----------------------------------------------------------------------------------


@njit(nogil=True)
def _take_block(arena):
    address = arena[arena[0]]
    arena[0] -= 1
    return address


@njit(nogil=True)
def _give_block(arena, address):
    arena[0] += 1
    arena[arena[0]] = address


@_inlined
def _row_of(states, state):
    """Return the directory row of a state's block; `states` is the header's column STATES."""
    block = state >> BLOCK_SHIFT
    return _int64_pointer(states + block * (8 * DIRECTORY_WIDTH))


@_inlined
def _address_of(states, state):
    return _row_of(states, state)[ADDRESS] + state * ENTRY_BYTES


@_inlined
def _at(states, state):
    return _int32_pointer(_address_of(states, state))


@_inlined
def _length_of(states, state):
    if state >= 0:
        return state + _row_of(states, state)[LENGTH_OFFSET]
    return np.int64(_at(states, state)[CLONE_LENGTH])


@_inlined
def _after(states, state):
    """Return the run's next prefix; 0 if the next prefix's block does not exist yet."""
    if state & BLOCK_MASK != BLOCK_MASK:
        return state + 1
    return _row_of(states, state)[NEXT_BLOCK]


@njit(nogil=True)
def _add_prefix_block(header, arena, length, writer):
    """Begin a block of prefixes; return its first prefix. `length` is this prefix's length."""
    first = header[PREFIX_BLOCKS] << BLOCK_SHIFT
    header[PREFIX_BLOCKS] += 1
    row = _row_of(header[STATES], first)
    row[ADDRESS] = _take_block(arena) - first * ENTRY_BYTES
    row[LENGTH_OFFSET] = length - first
    row[NEXT_BLOCK] = 0
    row[WRITER] = writer
    return first


@_inlined
def _begin_prefix(states, state, latest):
    entry = _at(states, state)
    entry[NEXT_TOKEN] = NONE
    entry[LINK] = 0
    entry[LATEST] = latest
    entry[FIRST_EDGE] = NONE


@njit(nogil=True)
def _free_all(header, arena):
    """Give back all blocks of an automaton and make it empty; its directories stay."""
    clone_blocks = (header[CLONES] + BLOCK_MASK) >> BLOCK_SHIFT
    for block in range(-clone_blocks, header[PREFIX_BLOCKS]):
        first = block << BLOCK_SHIFT
        _give_block(arena, _address_of(header[STATES], first))
    _free_edge_blocks(header[EDGES], 0, header[EDGE_BLOCKS], arena)
    if header[OLD_EDGE_SLOTS] != 0:
        first_left = header[FRONTIER] >> BLOCK_SHIFT
        _free_edge_blocks(
            header[OLD_EDGES], first_left, header[OLD_EDGE_SLOTS] >> BLOCK_SHIFT, arena
        )
    for column in (
        PREFIX_BLOCKS, CLONES, EDGE_SLOTS, EDGE_BLOCKS, EDGE_COUNT, OLD_EDGE_SLOTS
    ):  # fmt: skip
        header[column] = 0


@njit(nogil=True)
def _free_edge_blocks(directory, start, stop, arena):
    addresses = _int64_pointer(directory)
    for block in range(start, stop):
        _give_block(arena, addresses[block] + (block << BLOCK_SHIFT) * ENTRY_BYTES)


# --- edges ------------------------------------------------------------------------------------


@_inlined
def _hash(state, token):
    """Return a key's 32-bit hash, which gives keys the same order in tables of every size."""
    key = (uint64(uint32(state)) << uint64(32)) | uint64(uint32(token))
    # A single multiplication would map consecutive states with the same token onto few slots.
    # Therefore the high half is mixed in before a second multiplication, as in splitmix64.
    key *= uint64(0x9E3779B97F4A7C15)
    key ^= key >> uint64(32)
    key *= uint64(0xBF58476D1CE4E5B9)
    return key >> uint64(32)


@_inlined
def _home(hashed, slots):
    """Return the slot where the search for a key begins."""
    return np.int64((hashed * uint64(slots - OVERFLOW_SLOTS)) >> uint64(32))


@_inlined
def _probe(directory, slots, home, state, token):
    """Return the address of a key's edge.

    If there is no such edge, return minus the address of the free slot that ended the search, or 0
    if the search reached no free slot.
    """
    addresses = _int64_pointer(directory)
    slot = home
    if addresses[slot >> BLOCK_SHIFT] == 0:  # no edge was moved to this block yet
        return np.int64(0)
    address = addresses[slot >> BLOCK_SHIFT] + slot * ENTRY_BYTES
    while True:
        edge = _int32_pointer(address)
        if edge[TARGET] == 0:
            return -address
        if edge[SOURCE] == state and edge[TOKEN] == token:
            return address
        slot += 1
        address += ENTRY_BYTES
        if slot & BLOCK_MASK == 0:
            if slot == slots or addresses[slot >> BLOCK_SHIFT] == 0:
                return np.int64(0)
            address = addresses[slot >> BLOCK_SHIFT] + slot * ENTRY_BYTES


@_inlined
def _table_of(header, state, token):
    """Return directory and size of the table that holds a key, and the slot to search first."""
    hashed = _hash(state, token)
    if header[OLD_EDGE_SLOTS] != 0:
        home = _home(hashed, header[OLD_EDGE_SLOTS])
        if home >= header[FRONTIER]:
            return header[OLD_EDGES], header[OLD_EDGE_SLOTS], home
    return header[EDGES], header[EDGE_SLOTS], _home(hashed, header[EDGE_SLOTS])


@_inlined
def _search_table(header, state, token):
    directory, slots, home = _table_of(header, state, token)
    return _probe(directory, slots, home, state, token)


@_inlined
def _own_target(entry, token):
    """Look for an edge for `token` in a clone's own entry.

    Return the column of the edge's target, or 0 if there is no such edge.
    """
    for column in OWN_EDGE_COLUMNS:
        if entry[column] == token:
            return column + 1
    return 0


@_inlined
def _find_edge(header, address, state, token):
    """Find a state's branching edge for `token`; return the address where its target is stored.

    `address` is the address of the state. If there is no such edge, return minus the address of the
    free slot that the edge would take in the table, or 0 if the table was not searched or is full.
    """
    entry = _int32_pointer(address)
    if state < 0:
        column = _own_target(entry, token)
        if column != 0:
            return address + 4 * column
    if entry[FIRST_EDGE] == NONE:
        return np.int64(0)
    edge = _search_table(header, state, token)
    return edge + 4 * TARGET if edge > 0 else edge


@_inlined
def _put_edge(header, address, state, token, target, found):
    """Give a state a new edge; return DONE, or NEED_EDGES if the edge table is full.

    `address` is the address of the state. `found` is what `_find_edge` returned, or 0 if it was not
    called.
    """
    entry = _int32_pointer(address)
    if state < 0:
        for column in OWN_EDGE_COLUMNS:
            if entry[column + 1] == 0:
                entry[column] = token
                entry[column + 1] = target
                return DONE
    if _edge_room(header) < 1:
        return NEED_EDGES
    slot = found if found < 0 else _search_table(header, state, token)
    if slot >= 0:
        return NEED_EDGES
    edge = _int32_pointer(-slot)
    edge[SOURCE] = state
    edge[TOKEN] = token
    edge[TARGET] = target
    edge[NEXT_EDGE] = entry[FIRST_EDGE]
    entry[FIRST_EDGE] = token
    header[EDGE_COUNT] += 1
    return DONE


@_inlined
def _edge_room(header):
    """Return how many edges may be added; searches are fast up to a load of four fifths."""
    room = header[EDGE_SLOTS] * 4 // 5 - header[EDGE_COUNT]
    if header[OLD_EDGE_SLOTS] != 0:
        # The rest of the old table may fill up a little more while edges move.
        added = header[EDGE_COUNT] - header[EDGES_BEFORE]
        room = min(room, header[OLD_EDGE_SLOTS] // 16 - added)
    return room


@njit(nogil=True)
def _add_edge_block(header, arena):
    block, address = header[EDGE_BLOCKS], _take_block(arena)
    words = _int64_pointer(address)
    for i in range(BLOCK_BYTES // 8):
        words[i] = 0
    _int64_pointer(header[EDGES])[block] = address - (block << BLOCK_SHIFT) * ENTRY_BYTES
    header[EDGE_BLOCKS] += 1


@njit(nogil=True)
def _move_edges(header, arena, slots):
    """Move edges from the old table to the new one, up to a free slot of the old table.

    `slots` is the minimum number of slots to move. No search crosses a free slot. Therefore keys
    whose search begins before the frontier are in the new table, and all others are in the old one.
    """
    old = _int64_pointer(header[OLD_EDGES])
    end = header[OLD_EDGE_SLOTS]
    blocks = header[EDGE_SLOTS] >> BLOCK_SHIFT
    slot = header[FRONTIER]
    goal = slot + slots
    while slot < end:
        edge = _int32_pointer(old[slot >> BLOCK_SHIFT] + slot * ENTRY_BYTES)
        is_free = edge[TARGET] == 0
        if not is_free:
            state, token = np.int64(edge[SOURCE]), np.int64(edge[TOKEN])
            home = _home(_hash(state, token), header[EDGE_SLOTS])
            # Displaced edges may lie one block after the block of the home slot.
            while header[EDGE_BLOCKS] < min((home >> BLOCK_SHIFT) + 2, blocks):
                _add_edge_block(header, arena)
            address = -_probe(header[EDGES], header[EDGE_SLOTS], home, state, token)
            if address <= 0:
                raise RuntimeError("an edge found no slot in a table half empty")
            moved = _int32_pointer(address)
            for column in range(4):
                moved[column] = edge[column]
        slot += 1
        if slot & BLOCK_MASK == 0:
            block = (slot >> BLOCK_SHIFT) - 1
            _free_edge_blocks(header[OLD_EDGES], block, block + 1, arena)
        if is_free and slot >= goal:
            break
    header[FRONTIER] = slot
    if slot == end:
        while header[EDGE_BLOCKS] < blocks:
            _add_edge_block(header, arena)
        header[OLD_EDGE_SLOTS] = 0


# --- the automaton ----------------------------------------------------------------------------


@_inlined
def _branches(header, state):
    """Return how many different tokens have followed a state's strings."""
    entry = _at(header[STATES], state)
    if state >= 0:
        count = np.int64(entry[NEXT_TOKEN] != NONE)
    else:
        count = np.int64(0)
        for column in OWN_EDGE_COLUMNS:
            count += entry[column + 1] != 0
    token = np.int64(entry[FIRST_EDGE])
    while token != NONE:
        count += 1
        token = np.int64(_int32_pointer(_search_table(header, state, token))[NEXT_EDGE])
    return count


@njit(nogil=True)
def _clone(header, arena, parent, token, edge, state):
    """Move the shorter strings of `state` to a clone.

    A string is moved if it is at most one token longer than the longest string of `parent`. The
    clone inherits the state's latest position. The target of the edge from `parent` to `state` is
    stored at the address `edge`. Returns the clone and DONE, or 0 and the reason for the failure.
    """
    states = header[STATES]
    source = _at(states, state)
    if source[FIRST_EDGE] != NONE:
        in_table = _branches(header, state) - CLONE_EDGES
        if _edge_room(header) < in_table:
            return np.int64(0), NEED_EDGES
    clone = -CLONE_PLACES - header[CLONES]
    if header[CLONES] & BLOCK_MASK == 0:
        first = (clone >> BLOCK_SHIFT) << BLOCK_SHIFT
        _row_of(states, clone)[ADDRESS] = _take_block(arena) - first * ENTRY_BYTES
    header[CLONES] += CLONE_PLACES
    address = _address_of(states, clone)
    entry = _int32_pointer(address)
    entry[CLONE_LENGTH] = _length_of(states, parent) + 1
    entry[LINK] = source[LINK]
    entry[LATEST] = _end_of(source)
    entry[CLONE_COUNT] = _count(states, state)
    entry[FIRST_EDGE] = NONE
    for column in OWN_EDGE_COLUMNS:
        entry[column], entry[column + 1] = NONE, 0
    source[LINK] = clone
    reason = DONE
    if state < 0:
        for column in range(LATEST_TOKEN, OWN_EDGES):
            entry[column] = source[column]
    else:
        entry[BEST_TOKEN], entry[BEST_TARGET], entry[BEST_COUNT] = NONE, 0, 0
        entry[LATEST_TOKEN], entry[LATEST_TARGET] = _latest_of(header, state)
        if source[NEXT_TOKEN] != NONE:
            entry[BEST_TOKEN], entry[BEST_TARGET] = source[NEXT_TOKEN], _after(states, state)
            entry[BEST_COUNT] = _times(states, _after(states, state))
            entry[OWN_EDGES], entry[OWN_EDGES + 1] = entry[BEST_TOKEN], entry[BEST_TARGET]
    copied = np.int64(source[FIRST_EDGE])
    while copied != NONE:
        original = _int32_pointer(_search_table(header, state, copied))
        target = np.int64(original[TARGET])
        reason |= _put_edge(header, address, clone, copied, target, 0)
        if state >= 0:
            times = _times(states, target)
            if times > entry[BEST_COUNT] or (
                times == entry[BEST_COUNT] and copied == entry[LATEST_TOKEN]
            ):
                entry[BEST_TOKEN], entry[BEST_TARGET], entry[BEST_COUNT] = copied, target, times
        copied = np.int64(original[NEXT_EDGE])
    if state < 0:
        for column in OWN_EDGE_COLUMNS:
            if source[column + 1] != 0:
                copied, target = np.int64(source[column]), np.int64(source[column + 1])
                reason |= _put_edge(header, address, clone, copied, target, 0)
    if reason != DONE:
        raise RuntimeError("an edge found no slot in a table that is not full")
    while True:  # edges of `parent` and of its suffixes now lead to the clone
        _int32_pointer(edge)[0] = clone
        if parent == 0:
            break
        address = _address_of(states, parent)
        if parent < 0:
            entry = _int32_pointer(address)
            for column in (LATEST_TARGET, BEST_TARGET):
                if entry[column] == state:
                    entry[column] = clone
        parent = np.int64(_int32_pointer(address)[LINK])
        edge = _find_edge(header, _address_of(states, parent), parent, token)
        if edge <= 0 or _int32_pointer(edge)[0] != state:
            break
    return clone, DONE


@_inlined
def _target_of(header, arena, state, token):
    """Follow a state's edge for `token`, and split the edge's target if necessary.

    The target is split if its longest string exceeds the longest string of `state` by more than one
    token. Returns the target and DONE. Returns 0 and DONE if the token never followed `state`, and
    0 and the reason if there is no room for the split.
    """
    states = header[STATES]
    if state >= 0 and _at(states, state)[NEXT_TOKEN] == token:
        return _after(states, state), DONE  # the next prefix of a run needs no split
    edge = _find_edge(header, _address_of(states, state), state, token)
    if edge <= 0:
        return np.int64(0), DONE
    target = np.int64(_int32_pointer(edge)[0])
    if _length_of(states, target) == _length_of(states, state) + 1:
        return target, DONE
    return _clone(header, arena, state, token, edge, target)


@_inlined
def _count(states, state):
    """Return how often a state's strings were continued, as recorded."""
    entry = _at(states, state)
    return np.int64(entry[CLONE_COUNT]) if state < 0 else np.int64(entry[LATEST]) >> COUNT_SHIFT


@_inlined
def _times(states, state):
    """Estimate how often an edge to a state was followed: the state's count, but at least 1."""
    return max(_count(states, state), 1)


@_inlined
def _latest_of(header, state):
    """Return the latest token that continued a prefix, and its target; NONE and 0 if none did."""
    states = header[STATES]
    address = _address_of(states, state)
    entry = _int32_pointer(address)
    end = _end_of(entry)
    token = np.int64(_at(states, end)[NEXT_TOKEN])
    if token == NONE or token == entry[NEXT_TOKEN]:
        return token, _after(states, state) if token != NONE else np.int64(0)
    edge = _find_edge(header, address, state, token)
    if edge <= 0:  # a text that waited for memory was dropped before it added this edge
        return np.int64(NONE), np.int64(0)
    return token, np.int64(_int32_pointer(edge)[0])


@_inlined
def _note(entry, state, position, token, target, times):
    """Record a continuation in a state's entry.

    `token` continued the state at `position`, and leads to `target`.
    """
    if state < 0:
        entry[LATEST] = position
        entry[CLONE_COUNT] += 1
        entry[LATEST_TOKEN], entry[LATEST_TARGET] = token, target
        if token == entry[BEST_TOKEN] or times >= entry[BEST_COUNT]:
            entry[BEST_TOKEN], entry[BEST_TARGET], entry[BEST_COUNT] = token, target, times
    else:
        count = min((np.int64(entry[LATEST]) >> COUNT_SHIFT) + 1, LARGEST_COUNT)
        entry[LATEST] = position | (count << COUNT_SHIFT)


@_inlined
def _note_known(states, state, position, token, new, link, links):
    """Record that `token` continued a state and its suffixes; change at most `links` states.

    `token` has followed the strings of these states before. `link` is the suffix link of the new
    prefix. An edge's count is the number of its target's earlier continuations, plus 1.
    """
    target, link_of_target, times = new, link, np.int64(1)
    longest_of_link = _length_of(states, link)
    for _ in range(links):
        if state == 0:
            break
        entry = _at(states, state)
        if state < 0:
            while entry[CLONE_LENGTH] < longest_of_link:  # a shorter string has a shorter target
                target = link_of_target
                times = _count(states, target) + 1
                link_of_target = np.int64(_at(states, target)[LINK])
                longest_of_link = _length_of(states, link_of_target)
        _note(entry, state, position, token, target, times)
        state = np.int64(entry[LINK])


@_inlined
def _lead_to(header, arena, last, new, token, max_link_updates):
    """Give every suffix of a text an edge for `token`; set the suffix link of the new prefix.

    Continuations are recorded along at most `max_link_updates` suffix links. Without this limit, a
    text that repeats one token would take longer with each repetition. States beyond the limit keep
    an older position and a lower count. Returns DONE, or a reason if the edge table is full. Once
    there is room, the whole call may be repeated.
    """
    states = header[STATES]
    # `position` is the state before `new`: `last` if `new` is the first state of its block.
    position = new - 1 if new & BLOCK_MASK != 0 else last
    state, link, left = last, np.int64(0), max_link_updates
    address = _address_of(states, last)
    while state != 0:
        state = np.int64(_int32_pointer(address)[LINK])
        address = _address_of(states, state)
        entry = _int32_pointer(address)
        if state >= 0 and entry[NEXT_TOKEN] == token:
            link = _after(states, state)
            break
        edge = _find_edge(header, address, state, token)
        if edge <= 0:
            reason = _put_edge(header, address, state, token, new, edge)
            if reason != DONE:
                return reason
            # The continuation is recorded before `_clone` is called below, because `_clone` may
            # split this state and then copies its count.
            if state != 0 and left > 0:
                _note(entry, state, position, token, new, np.int64(1))
        else:
            target = np.int64(_int32_pointer(edge)[0])
            if target != new:
                link = target
                if _length_of(states, target) != _length_of(states, state) + 1:
                    link, reason = _clone(header, arena, state, token, edge, target)
                    if reason != DONE:
                        return reason
                break
        left -= 1
    _at(states, new)[LINK] = link
    _note_known(states, state, position, token, new, link, left)
    return DONE


@_inlined
def _begin_next(header, arena, text, token):
    """Make a text's next state, without a suffix link; return (state, DONE) or (0, reason)."""
    states = header[STATES]
    last = text[LAST]
    address = _address_of(states, last)
    if last >= 0 and _int32_pointer(address)[NEXT_TOKEN] == NONE:  # `last` is the end of its run
        new = _after(states, last)
        if new == 0:
            new = _add_prefix_block(header, arena, _length_of(states, last) + 1, text[TEXT_WRITER])
            _row_of(states, last)[NEXT_BLOCK] = new
        position = last
    else:  # another text continued `last` with another token, so begin a run
        # The run's block is added below, once there is room for the edge to the run.
        position = header[PREFIX_BLOCKS] << BLOCK_SHIFT
        new = position + 1
        reason = _put_edge(header, address, last, token, new, 0)
        if reason != DONE:
            return np.int64(0), reason
        _add_prefix_block(header, arena, _length_of(states, last), text[TEXT_WRITER])
    _note(_int32_pointer(address), last, position, token, new, np.int64(1))
    _at(states, position)[NEXT_TOKEN] = token
    _begin_prefix(states, new, new)
    return new, DONE


@_inlined
def _append(header, arena, text, token, max_link_updates):
    if arena[0] < BLOCKS_PER_TOKEN:
        return NEED_BLOCKS
    if (
        header[PREFIX_BLOCKS] == header[PREFIX_BLOCK_ROOM]
        or header[CLONES] >> BLOCK_SHIFT == header[CLONE_BLOCK_ROOM]
    ):
        return NEED_DIRECTORY
    if header[EDGE_SLOTS] == 0:
        return NEED_EDGES
    if header[PREFIX_BLOCKS] == MOST_PREFIX_BLOCKS:
        return TOO_LONG
    if header[PREFIX_BLOCKS] == 0:
        _begin_prefix(header[STATES], _add_prefix_block(header, arena, 0, text[TEXT_WRITER]), 0)
    if header[OLD_EDGE_SLOTS] != 0:
        _move_edges(header, arena, MOVED_SLOTS)
    last, new = text[LAST], text[PENDING]
    if new == 0:
        if header[SHARED] == 1:  # another text may have continued with the same token
            target, reason = _target_of(header, arena, last, token)
            if reason != DONE:
                return reason
            if target != 0:
                text[LAST] = target
                return DONE
        new, reason = _begin_next(header, arena, text, token)
        if reason != DONE:
            return reason
        text[PENDING] = new
    reason = _lead_to(header, arena, last, new, token, max_link_updates)
    if reason != DONE:
        return reason
    text[LAST] = new
    text[PENDING] = 0
    return DONE


@_inlined
def _text_changed(text, token_ids, row, length):
    """Whether a row differs from the text read so far instead of continuing it.

    A request id may be reused, or a request's text may be cut. Only the length and the last few
    tokens are compared. A changed row that is not noticed only lowers acceptance.
    """
    read = text[LENGTH]
    if length < read:
        return True
    for position in range(max(0, read - GUARD_TOKENS), read):
        if text[GUARD + (position & (GUARD_TOKENS - 1))] != token_ids[row, position]:
            return True
    return False


@njit(nogil=True)
def _catch_up(
    automata, texts, arena, slot, token_ids, row, length, max_link_updates, progress
):  # fmt: skip
    """Read a row's new tokens up to `length`; return DONE or the reason why reading stopped."""
    if slot >= texts.shape[0] or texts[slot, TEXT_OPEN] == 0:
        return BAD_SLOT
    if row < 0 or row >= token_ids.shape[0] or length < 0 or length > token_ids.shape[1]:
        return BAD_ROW
    text = _pointer_of_row(texts, slot)
    header = _pointer_of_row(automata, text[AUTOMATON])
    if _text_changed(text, token_ids, row, length):
        if header[SHARED] == 0:  # what the text added to a shared automaton stays there
            _free_all(header, arena)
        text[LAST] = 0
        text[LENGTH] = 0
        text[PENDING] = 0
        progress[REBUILDS] += 1
    while text[LENGTH] < length:
        token = np.int64(token_ids[row, text[LENGTH]])
        if token < 0:
            return NEGATIVE_TOKEN
        reason = _append(header, arena, text, token, max_link_updates)
        if reason != DONE:
            return reason
        text[GUARD + (text[LENGTH] & (GUARD_TOKENS - 1))] = token
        text[LENGTH] += 1
        progress[APPENDED] += 1
    return DONE


@_inlined
def _end_of(entry):
    return np.int64(entry[LATEST]) & PREFIX_MASK


@_inlined
def _fetch_state(states, state):
    _prefetch(_address_of(states, state))


@_inlined
def _edge_at_hand(states, address, state, token):
    """Return the state after `token`; return 0 if only the edge table could show it."""
    entry = _int32_pointer(address)
    if state >= 0:
        return _after(states, state) if entry[NEXT_TOKEN] == token else np.int64(0)
    column = _own_target(entry, token)
    return np.int64(entry[column]) if column != 0 else np.int64(0)


@_inlined
def _fetch_slot(header, state, token):
    directory, _, home = _table_of(header, state, token)
    block = _int64_pointer(directory)[home >> BLOCK_SHIFT]
    if block != 0:
        _prefetch(block + home * ENTRY_BYTES)


@njit(nogil=True)
def _scout(automata, texts, slots, rows, token_ids, lengths, first, lanes):
    """Prefetch the memory that is needed to read the next few tokens of a number of rows.

    Each pass follows one suffix link of every row and prefetches the next link's memory, so that
    the waits for memory overlap. The first passes look for the states that the rows' tokens lead
    to. The last passes follow the other suffix links. The rows are those from index `first` on.
    Only the scratch space `lanes` is written to.
    """
    row_of, position_of = _pointer_of_row(lanes, 0), _pointer_of_row(lanes, 1)
    header_of, token_of = _pointer_of_row(lanes, 2), _pointer_of_row(lanes, 3)
    state_of, ahead_of = _pointer_of_row(lanes, 4), _pointer_of_row(lanes, 5)
    asked_of, adds_of = _pointer_of_row(lanes, 6), _pointer_of_row(lanes, 7)
    left = _pointer_of_row(lanes, 8)
    chain_header, chain_state = _pointer_of_row(lanes, 9), _pointer_of_row(lanes, 10)
    count = 0
    for i in range(first, min(first + ROWS_SCOUTED, slots.size)):
        slot, row = np.int64(slots[i]), np.int64(rows[i])
        if slot < 0 or slot >= texts.shape[0] or row < 0 or row >= token_ids.shape[0]:
            continue
        text = _pointer_of_row(texts, slot)
        automaton = _address_of_row(automata, text[AUTOMATON])
        header = _int64_pointer(automaton)
        if text[TEXT_OPEN] == 0 or header[PREFIX_BLOCKS] == 0:
            continue
        read = text[LENGTH]
        if read >= min(np.int64(lengths[i]), token_ids.shape[1]):
            continue
        _fetch_state(header[STATES], text[LAST])
        _prefetch(
            np.int64(token_ids.ctypes.data) + row * token_ids.strides[0]
            + read * token_ids.strides[1]
        )  # fmt: skip
        row_of[count], position_of[count] = i, read
        header_of[count], state_of[count], adds_of[count] = automaton, text[LAST], 0
        count += 1
    chains = 0
    for _ in range(TOKENS_SCOUTED):
        for lane in range(count):
            left[lane] = lane
            token_of[lane] = token_ids[rows[row_of[lane]], position_of[lane]]
            ahead_of[lane], asked_of[lane] = 0, NO_STATE
            if token_of[lane] < 0:  # `_catch_up` will refuse this token
                state_of[lane] = NO_STATE
        looking = count
        for _ in range(LINKS_SCOUTED):
            still = 0
            for at in range(looking):
                lane = left[at]
                header = _int64_pointer(header_of[lane])
                state, token, states = state_of[lane], token_of[lane], header[STATES]
                if asked_of[lane] != NO_STATE:
                    edge = _search_table(header, asked_of[lane], token)
                    asked_of[lane] = NO_STATE
                    if edge > 0:
                        ahead_of[lane] = np.int64(_int32_pointer(edge)[TARGET])
                        _fetch_state(states, ahead_of[lane])
                        continue
                if state == NO_STATE:  # the token is new to the automaton
                    continue
                address = _address_of(states, state)
                entry = _int32_pointer(address)
                link = np.int64(entry[LINK])
                _fetch_state(states, link)
                state_of[lane] = link if state != 0 else NO_STATE
                ahead = _edge_at_hand(states, address, state, token)
                if ahead != 0:
                    ahead_of[lane] = ahead
                    _fetch_state(states, ahead)
                    continue
                # The text will add a state, so its suffixes will need edges to this state.
                adds_of[lane] = 1
                if entry[FIRST_EDGE] != NONE:
                    _fetch_slot(header, state, token)
                    asked_of[lane] = state
                left[still] = lane
                still += 1
            looking = still
            if looking == 0:
                break
        still = 0
        for lane in range(count):
            i, state = row_of[lane], state_of[lane]
            chain_header[chains], chain_state[chains] = header_of[lane], state
            chains += np.int64((adds_of[lane] == 1) & (state != 0) & (state != NO_STATE))
            if position_of[lane] + 1 == lengths[i]:  # drafting begins at the state after this token
                chain_header[chains], chain_state[chains] = header_of[lane], ahead_of[lane]
                chains += np.int64(ahead_of[lane] != 0)
            row_of[still], position_of[still] = i, position_of[lane] + 1
            header_of[still], state_of[still] = header_of[lane], ahead_of[lane]
            adds_of[still] = adds_of[lane]
            still += np.int64(position_of[still] < min(np.int64(lengths[i]), token_ids.shape[1]))
        count = still
    for _ in range(LINKS_SCOUTED):
        still = 0
        for at in range(chains):
            state, states = chain_state[at], _int64_pointer(chain_header[at])[STATES]
            link = np.int64(_at(states, state)[LINK])
            _fetch_state(states, link)
            chain_header[still], chain_state[still] = chain_header[at], link
            still += np.int64(link != 0)
        chains = still


# --- what Python calls ------------------------------------------------------------------------


@kernel(
    INT64_2D, INT64_2D, INT64, GIVEN_INT32, GIVEN_INT32, GIVEN_INT32_2D, GIVEN_INT32, types.int64,
    types.int64, INT64, INT64_2D,
)  # fmt: skip
def extend_rows(
    automata, texts, arena, slots, rows, token_ids, lengths, max_link_updates, first, progress,
    lanes,
):  # fmt: skip
    """Read the rows from `first` on; return the row that could not be read, or `slots.size`."""
    free = _pointer_of(arena)
    for i in range(first, slots.size):
        if (i - first) % ROWS_SCOUTED == 0:
            _scout(automata, texts, slots, rows, token_ids, lengths, i, lanes)
        if slots[i] < 0:
            continue
        progress[REASON] = _catch_up(
            automata, texts, free, np.int64(slots[i]), token_ids, np.int64(rows[i]),
            np.int64(lengths[i]), max_link_updates, progress,
        )  # fmt: skip
        if progress[REASON] != DONE:
            return i
    return slots.size


@kernel(INT64_2D, INT64_2D, GIVEN_INT32, INT64_2D)
def place_rows(automata, texts, slots, out_places):
    """Write each row's place; NOWHERE if the row is skipped, or if none of its text was read."""
    for i in range(slots.size):
        place = out_places[i]
        place[interface.PLACE_KIND] = interface.NOWHERE
        if slots[i] < 0:
            continue
        text = texts[slots[i]]
        if text[LENGTH] == 0:
            continue
        header = _pointer_of_row(automata, text[AUTOMATON])
        place[interface.PLACE_KIND] = interface.LIVE
        place[interface.PLACE_HEADER] = _address_of_row(automata, text[AUTOMATON])
        place[interface.PLACE_STATE] = text[LAST]
        place[interface.PLACE_LENGTH] = _length_of(header[STATES], text[LAST])
        place[interface.PLACE_TEXT] = text[TEXT_WRITER]


@kernel(INT64, INT64)
def free_blocks(header, arena):
    """Give an automaton's blocks back to the arena."""
    _free_all(_pointer_of(header), _pointer_of(arena))


@kernel(INT64, INT64, types.int64, types.int64)
def begin_table(header, arena, directory, slots):
    """Give an automaton its first edge table; `directory` is the address of a zeroed directory."""
    header[EDGES] = directory
    header[EDGE_SLOTS] = slots
    while header[EDGE_BLOCKS] < slots >> BLOCK_SHIFT:
        _add_edge_block(_pointer_of(header), _pointer_of(arena))


@kernel(INT64, types.int64, types.int64)
def begin_moving(header, directory, slots):
    """Begin to move edges to a larger table; a few slots are moved for each token that is read."""
    header[OLD_EDGES] = header[EDGES]
    header[OLD_EDGE_SLOTS] = header[EDGE_SLOTS]
    header[FRONTIER] = 0
    header[EDGES_BEFORE] = header[EDGE_COUNT]
    header[EDGES] = directory
    header[EDGE_SLOTS] = slots
    header[EDGE_BLOCKS] = 0


@kernel(INT64, INT64)
def finish_moving(header, arena):
    """Move all remaining edges at once; called if a token's edges do not fit while edges move."""
    _move_edges(_pointer_of(header), _pointer_of(arena), header[OLD_EDGE_SLOTS])


def warm_up() -> None:
    """Compile or load the kernels; a machine's first call takes seconds, later calls about 1 s."""
    compilation.warm_up(
        extend_rows, place_rows, free_blocks, begin_table, begin_moving, finish_moving
    )
