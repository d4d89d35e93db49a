"""Compiled half of `static.py`: from a finished text to the packed arrays of its automaton.

The online construction of Blumer et al. (1985). The length of a finished text is known, so states
get their final numbers at once. State i <= n is the prefix of length i, whose edge to i + 1 is
implicit; clones follow in the order of their creation.

No string of a document contains the separator, and separators count as different from each other.
The state after one therefore links to the empty string, and only the implicit edge leads there.
"""

import numpy as np
from numba import njit, types, uint32, uint64

from sam_rollout.automaton.compilation import WarmUp, compile_kernels

# Columns of the hash table of branching edges, int32[capacity, 4]. No edge leads to state 0:
# TARGET 0 marks a free slot.
SOURCE = 0
TOKEN = 1
TARGET = 2
NEXT_EDGE = 3  # 1 + slot of the next edge of the same state, 0 for none
EDGE_WIDTH = 4

# Progress of a construction, int64[PROGRESS_WIDTH].
READ = 0
CLONES = 1
EDGES = 2
PROGRESS_WIDTH = 3

SEPARATOR = 2**31 - 1


@njit(nogil=True)
def _find_edge(edges, state, token):
    """Slot of a branching edge, or -1 - the slot where it belongs if there is none."""
    key = (uint64(uint32(state)) << uint64(32)) | uint64(uint32(token))
    # Two multiplications with mixing in between, as in splitmix64: one alone would map runs of
    # states with one token onto few slots.
    key *= uint64(0x9E3779B97F4A7C15)
    key ^= key >> uint64(32)
    key *= uint64(0xBF58476D1CE4E5B9)
    capacity = edges.shape[0]
    slot = np.int64(((key >> uint64(32)) * uint64(capacity)) >> uint64(32))
    while edges[slot, TARGET] != 0:
        if edges[slot, SOURCE] == state and edges[slot, TOKEN] == token:
            return slot
        slot += 1
        if slot == capacity:
            slot = 0
    return -1 - slot


@njit(nogil=True)
def _put_edge(edges, first_edge, slot, state, token, target):
    """Store an edge in a free slot and chain it to its state."""
    edges[slot, SOURCE] = state
    edges[slot, TOKEN] = token
    edges[slot, TARGET] = target
    edges[slot, NEXT_EDGE] = first_edge[state]
    first_edge[state] = slot + 1


@njit(nogil=True)
def _clone(text, link, clone_length, edges, first_edge, progress, parent, length, token, state):
    """Split off the strings of `state` up to `length`; return the clone, 0 if edges lack room."""
    tokens = text.size - 1
    implicit = state <= tokens and text[state] != SEPARATOR
    count = 1 if implicit else 0
    at = first_edge[state]
    while at:
        count += 1
        at = edges[at - 1, NEXT_EDGE]
    if progress[EDGES] + count > edges.shape[0] * 4 // 5:
        return np.int64(0)
    progress[EDGES] += count
    progress[CLONES] += 1
    clone = tokens + progress[CLONES]
    clone_length[clone - tokens - 1] = length
    link[clone] = link[state]
    if implicit:
        slot = -1 - _find_edge(edges, clone, text[state])
        _put_edge(edges, first_edge, slot, clone, text[state], state + 1)
    at = first_edge[state]
    while at:
        copied, target, following = edges[at - 1, TOKEN], edges[at - 1, TARGET], edges[at - 1, 3]
        slot = -1 - _find_edge(edges, clone, copied)
        _put_edge(edges, first_edge, slot, clone, copied, target)
        at = following
    link[state] = clone
    while True:  # lead the shorter contexts of the token to the clone
        slot = _find_edge(edges, parent, token)
        if slot < 0 or edges[slot, TARGET] != state:
            break
        edges[slot, TARGET] = clone
        if parent == 0:
            break
        parent = np.int64(link[parent])
    return clone


@njit(nogil=True)
def _length_of(tokens, clone_length, state):
    return state if state <= tokens else np.int64(clone_length[state - tokens - 1])


@njit(nogil=True)
def read_text(text, link, clone_length, edges, first_edge, progress):
    """Read on until the text ends or the edge table is four fifths full; return whether it ended.

    A token that the table has no room for is read again from its beginning in the next call:
    edges that lead to its prefix already are passed over.

    Args:
        text: int32[n + 1]; the last entry is not read.
        link: int32[n + 1 + c], clone_length: int32[c], first_edge: int32[n + 1 + c] of zeros,
            with room for c = n clones.
        edges: int32[capacity, EDGE_WIDTH] of zeros.
        progress: int64[PROGRESS_WIDTH] of zeros.
    """
    tokens = text.size - 1
    while progress[READ] < tokens:
        last = progress[READ]
        new, token = last + 1, text[last]
        state = last
        found = np.int64(0)
        while state != 0 and token != SEPARATOR:
            state = np.int64(link[state])
            if state < last and text[state] == token:
                found = state + 1  # an implicit edge joins neighbours: nothing to split
                break
            slot = _find_edge(edges, state, token)
            if slot < 0:
                if progress[EDGES] + 1 > edges.shape[0] * 4 // 5:
                    return False
                progress[EDGES] += 1
                _put_edge(edges, first_edge, -1 - slot, state, token, new)
                continue
            target = np.int64(edges[slot, TARGET])
            if target == new:
                continue
            length = _length_of(tokens, clone_length, state) + 1
            if _length_of(tokens, clone_length, target) == length:
                found = target
                break
            found = _clone(
                text, link, clone_length, edges, first_edge, progress, state, length, token, target
            )
            if found == 0:
                return False
            break
        link[new] = found
        progress[READ] = new
    return True


@njit(nogil=True)
def move_edges(old, new, first_edge):
    """Hash all edges into a larger table of zeros."""
    for slot in range(old.shape[0]):
        if old[slot, TARGET] != 0:
            first_edge[old[slot, SOURCE]] = 0
    for slot in range(old.shape[0]):
        if old[slot, TARGET] != 0:
            state, token = old[slot, SOURCE], old[slot, TOKEN]
            free = -1 - _find_edge(new, state, token)
            _put_edge(new, first_edge, free, state, token, old[slot, TARGET])


@njit(nogil=True)
def pack_edges(edges, edge_start, edge_token, edge_target):
    """Lay the edges out by state and token.

    Args:
        edge_start: int32[states + 1] of zeros.
        edge_token, edge_target: int32[edges].
    """
    for slot in range(edges.shape[0]):
        if edges[slot, TARGET] != 0:
            edge_start[edges[slot, SOURCE] + 1] += 1
    for state in range(1, edge_start.size):
        edge_start[state] += edge_start[state - 1]
    for slot in range(edges.shape[0]):
        if edges[slot, TARGET] != 0:
            state = edges[slot, SOURCE]
            edge_token[edge_start[state]] = edges[slot, TOKEN]
            edge_target[edge_start[state]] = edges[slot, TARGET]
            edge_start[state] += 1  # where the next state starts, in the end; moved back below
    for state in range(edge_start.size - 1, 0, -1):
        edge_start[state] = edge_start[state - 1]
    edge_start[0] = 0
    for state in range(edge_start.size - 1):
        _sort_edges(edge_token, edge_target, edge_start[state], edge_start[state + 1])


@njit(nogil=True)
def _sort_edges(edge_token, edge_target, first, end):
    """Sort a state's edges by token; most states have two or three."""
    if end - first > 16:
        order = np.argsort(edge_token[first:end])
        edge_token[first:end] = edge_token[first:end][order]
        edge_target[first:end] = edge_target[first:end][order]
        return
    for i in range(first + 1, end):
        token, target = edge_token[i], edge_target[i]
        j = i
        while j > first and edge_token[j - 1] > token:
            edge_token[j] = edge_token[j - 1]
            edge_target[j] = edge_target[j - 1]
            j -= 1
        edge_token[j] = token
        edge_target[j] = target


@njit(nogil=True)
def _longest_first(tokens, clone_length):
    """All states by the length of their longest string, int32[states]."""
    first = np.zeros(tokens + 2, np.int32)  # place of the next clone of each length
    for length in clone_length:
        first[tokens - length + 1] += 1
    for i in range(1, first.size):
        first[i] += first[i - 1]
    clones = np.empty(clone_length.size, np.int32)
    for clone in range(clone_length.size):
        place = tokens - clone_length[clone]
        clones[first[place]] = clone
        first[place] += 1
    order = np.empty(tokens + 1 + clone_length.size, np.int32)
    prefix, i = tokens, 0
    for at in range(order.size):
        if i < clones.size and clone_length[clones[i]] >= prefix:
            order[at] = tokens + 1 + clones[i]
            i += 1
        else:
            order[at] = prefix
            prefix -= 1
    return order


@njit(nogil=True)
def find_continuations(text, link, clone_length, edge_start, edge_target, goes_on):
    """Fill `goes_on`, int32[states] of zeros; see `StaticAutomaton`.

    Every edge leads to longer strings, so states are visited from the longest to the shortest. The
    continuation of the state behind the most frequent next token is then known, and this state's
    begins one position before it.
    """
    tokens = text.size - 1
    order = _longest_first(tokens, clone_length)
    occurrences = np.zeros(link.size, np.int32)
    latest = np.zeros(link.size, np.int32)
    for prefix in range(1, tokens + 1):
        occurrences[prefix] = 1
        latest[prefix] = prefix
    for state in order:
        if state != 0:
            occurrences[link[state]] += occurrences[state]
            latest[link[state]] = max(latest[link[state]], latest[state])
    for state in order:
        if state == 0:
            continue
        best = 0
        if state <= tokens and text[state] != SEPARATOR:
            best = state + 1
        for edge in range(edge_start[state], edge_start[state + 1]):
            target = edge_target[edge]
            if best == 0 or (occurrences[target], latest[target]) > (
                occurrences[best],
                latest[best],
            ):
                best = target
        if best != 0:
            # After a state that only ends documents nothing follows: any of its ends will do.
            goes_on[state] = (goes_on[best] if goes_on[best] else latest[best]) - 1


_INT = types.Array(types.int32, 1, "C")
_TABLE = types.Array(types.int32, 2, "C")


def warm_up() -> WarmUp:
    """Compile the kernels, or load them from numba's disk cache; as `kernels.warm_up`."""
    return compile_kernels(
        (
            (read_text, (_INT, _INT, _INT, _TABLE, _INT, types.Array(types.int64, 1, "C"))),
            (move_edges, (_TABLE, _TABLE, _INT)),
            (pack_edges, (_TABLE, _INT, _INT, _INT)),
            (find_continuations, (_INT,) * 6),
        )
    )
