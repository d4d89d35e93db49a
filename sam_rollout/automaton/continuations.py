"""What may follow a text, by the suffixes of it that an automaton knows, and where a token leads.

A place is where a text stands in an automaton: the state of its longest suffix there. Drafting goes
on from a place token by token without changing the automaton, so that several automata can be asked
for every token of one draft. `drafting/policy.py` weighs what they say.
"""

import numpy as np
from numba import njit

from sam_rollout.automaton import kernels as live
from sam_rollout.automaton import static
from sam_rollout.automaton import static_match as packed
from sam_rollout.automaton.interface import COUNT_SHIFT, LIVE, READY

# Suffixes asked: the longest one that something followed, and the next shorter one that occurred in
# more places and went on.
LEVELS = 2
VOTES_PER_LEVEL = 2  # the most frequent continuation and, if it is another one, the latest
# Continuations of a state that are compared, the newest first.
COMPARED_BRANCHES = 16

# What is known of a continuation, as a number below CLASSES.
LENGTHS = (2, 3, 4, 6, 8, 12, 16, 24, 40)  # of the suffix: lowest values of the classes but one
COUNTS = (2, 3, 5, 10, 30)  # how often the suffix went on
SHARES = (0.4, 0.66, 0.9)  # how often with this token
WRITERS = 3  # whose text did so last: any other's, that of a sibling, this one's own
LENGTH_CLASSES = len(LENGTHS) + 1
_PER_LENGTH = (len(COUNTS) + 1) * (len(SHARES) + 1) * 2 * WRITERS
CLASSES = LENGTH_CLASSES * _PER_LENGTH


@njit(nogil=True)
def _class_in(value, lowest):
    number = 0
    for bound in lowest:
        if value < bound:
            break
        number += 1
    return number


@njit(nogil=True)
def _class_of(length, count, votes, is_latest, writer):
    number = _class_in(length, LENGTHS) * (len(COUNTS) + 1) + _class_in(count, COUNTS)
    number = number * (len(SHARES) + 1) + _class_in(votes / count, SHARES)
    return (2 * number + is_latest) * WRITERS + writer


@njit(nogil=True)
def vote(kind, address, state, length, text, first, tokens, classes, count):
    """Append what may follow a place.

    Args:
        kind, address, state, length, text: of the place.
        first: where the class numbers of the source begin.
        tokens, classes: of the votes so far, to be appended to.
        count: number of votes so far.

    Returns:
        The number of votes now.
    """
    if kind == LIVE:
        return _vote_live(address, state, length, text, first, tokens, classes, count)
    if kind == READY:
        if state < length:
            tokens[count] = live._int32_pointer(address)[state]
            classes[count] = first + _class_of(state + 1, np.int64(1), 1.0, np.int64(1), 0)
            count += 1
        return count
    return _vote_static(address, state, length, first, tokens, classes, count)


@njit(nogil=True)
def _vote_live(address, state, length, text, first, tokens, classes, count):
    header = live._int64_pointer(address)
    states = header[live.STATES]
    levels = 0
    while state != 0 and levels < LEVELS:
        entry = live._at(states, state)
        newest = np.int64(live._at(states, live._end_of(entry))[live.NEXT_TOKEN])
        if newest != live.NONE:
            count = _vote_state(header, state, length, newest, text, first, tokens, classes, count)
            levels += 1
        state = np.int64(entry[live.LINK])
        length = live._length_of(states, state)
    return count


@njit(nogil=True)
def _times(states, target):
    """How often an edge was followed, as far as it was noted; once at least."""
    return max(np.int64(live._at(states, target)[live.LATEST]) >> COUNT_SHIFT, 1)


@njit(nogil=True)
def _vote_state(header, state, length, newest, text, first, tokens, classes, count):
    states = header[live.STATES]
    entry = live._at(states, state)
    total, most, chosen, best = np.int64(0), np.int64(0), np.int64(live.NONE), np.int64(0)
    latest, at_latest = np.int64(0), np.int64(0)  # its votes and target
    if state >= 0:
        if entry[live.NEXT_TOKEN] != live.NONE:
            chosen, best = np.int64(entry[live.NEXT_TOKEN]), live._after(states, state)
            total = most = _times(states, best)
            if chosen == newest:
                latest, at_latest = most, best
    else:
        for column in (live.OLDEST_TOKEN, live.SECOND_TOKEN):
            target = np.int64(entry[column + 1])
            if target != 0:
                token, times = np.int64(entry[column]), _times(states, target)
                total += times
                if token == newest:
                    latest, at_latest = times, target
                if times > most or (times == most and token == newest):
                    most, chosen, best = times, token, target
    token = np.int64(entry[live.FIRST_EDGE])
    compared = 0
    while token != live.NONE and compared < COMPARED_BRANCHES:
        edge = live._int32_pointer(live._search_table(header, state, token))
        target = np.int64(edge[live.TARGET])
        times = _times(states, target)
        total += times
        if token == newest:
            latest, at_latest = times, target
        if times > most or (times == most and token == newest):
            most, chosen, best = times, token, target
        token = np.int64(edge[live.NEXT_EDGE])
        compared += 1
    if chosen == live.NONE:
        return count
    total = max(total, np.int64(entry[live.LATEST]) >> COUNT_SHIFT)
    tokens[count] = chosen
    classes[count] = first + _class_of(
        length, total, most, np.int64(chosen == newest), _writer(states, best, text)
    )
    count += 1
    if chosen != newest and latest != 0:
        tokens[count] = newest
        classes[count] = first + _class_of(
            length, total, latest, np.int64(1), _writer(states, at_latest, text)
        )
        count += 1
    return count


@njit(nogil=True)
def _writer(states, target, text):
    """Whose text followed an edge last, as a class."""
    writer = live._row_of(states, live._end_of(live._at(states, target)))[live.WRITER]
    if writer == text:
        return 2
    return 1 if writer >> live.GROUP_SHIFT == text >> live.GROUP_SHIFT else 0


@njit(nogil=True)
def _vote_static(address, state, length, first, tokens, classes, count):
    header = live._int64_pointer(address)
    levels = 0
    for _ in range(packed._MAX_STEPS_BACK):
        if state == 0 or levels == LEVELS:
            break
        end = live._int32_pointer(header[static.GOES_ON])[state]
        if 0 < end < header[static.TOKENS]:
            token = np.int64(live._int32_pointer(header[static.TEXT])[end])
            if 0 <= token < header[static.VOCABULARY]:
                tokens[count] = token
                classes[count] = first + _class_of(length, np.int64(1), 1.0, np.int64(1), 0)
                count += 1
                levels += 1
        state, length = packed._shorter(header, state, length)
    return count


@njit(nogil=True)
def follow(kind, address, state, length, token):
    """Where a token leads from a place: state and length of the longest suffix then.

    A draft made elsewhere has no more to say where it was not followed.
    """
    if kind == READY:
        goes_on = state < length and live._int32_pointer(address)[state] == token
        return (state + 1, length) if goes_on else (state, np.int64(0))
    header = live._int64_pointer(address)
    if kind == LIVE:
        states = header[live.STATES]
        while True:
            entry_address = live._address_of(states, state)
            if state >= 0 and live._int32_pointer(entry_address)[live.NEXT_TOKEN] == token:
                return live._after(states, state), length + 1
            edge = live._find_edge(header, entry_address, state, token)
            if edge > 0:
                return np.int64(live._int32_pointer(edge)[0]), length + 1
            if state == 0:
                return np.int64(0), np.int64(0)
            state = np.int64(live._int32_pointer(entry_address)[live.LINK])
            length = live._length_of(states, state)
    target = packed._follow(header, state, token)
    while target == 0 and state != 0:
        state, length = packed._shorter(header, state, length)
        target = packed._follow(header, state, token)
    if target == 0:
        return np.int64(0), np.int64(0)
    return target, length + 1
