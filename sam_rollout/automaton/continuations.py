"""Finds votes for a text's next token, and the text's place after one more token.

A text's place in an automaton is the state of the text's longest suffix that occurs there. A draft
goes on from this place token by token and does not change the automaton.
"""

import math

import numpy as np
from numba import njit

from sam_rollout.automaton import interface
from sam_rollout.automaton import kernels as live
from sam_rollout.automaton.kernels import _inlined

# Votes come from two suffixes of a text: the longest one that was continued, and the next shorter
# one that occurred in more places.
LEVELS = 2
VOTES_PER_LEVEL = 2  # one for the most frequent continuation, one for the latest if it differs
OTHER_VOTES = 6  # maximum number of further votes per suffix, for drafts that may branch

# A vote's class is a number below CLASSES. It combines the ranges in which the vote's figures lie.
# Each tuple holds the lower bounds of a figure's ranges; the first range has no lower bound.
LENGTHS = (2, 3, 5, 9, 20)  # length of the suffix in tokens
COUNTS = (2, 3, 4, 6, 10, 20, 50)  # how often the suffix was continued
SHARES = (0.25, 0.4, 0.5, 0.66, 0.8, 0.9)  # share of the suffix's continuations with this token
WRITERS = 3  # the continuation's last writer: a text of another prompt, a sibling, the text itself
LENGTH_CLASSES = len(LENGTHS) + 1
_SHAPE = LENGTH_CLASSES, len(COUNTS) + 1, len(SHARES) + 1, 2, WRITERS
CLASSES = math.prod(_SHAPE)
# Classes of votes from drafts made elsewhere (READY). The index on the first axis says between
# which bounds of SHARES the certainty of a vote lies.
# Votes from automata hardly ever have these classes: the suffix's count would have to be 1, and
# the voted token would have to differ from the latest continuation.
READY_CLASSES = np.arange(CLASSES).reshape(_SHAPE)[:, 0, :, 0].swapaxes(0, 1)


@_inlined
def _class_in(value, lowest):
    number = 0
    for bound in lowest:  # a sum avoids branches, which the processor would often mispredict
        number += value >= bound
    return number


@_inlined
def _class_of(length, count, votes, is_latest, writer):
    number = _class_in(length, LENGTHS) * (len(COUNTS) + 1) + _class_in(count, COUNTS)
    number = number * (len(SHARES) + 1) + _class_in(votes / count, SHARES)
    return (2 * number + is_latest) * WRITERS + writer


@_inlined
def _writer_of(states, end, text):
    """Return who wrote a prefix: 2 for the text itself, 1 for a sibling, 0 for any other text."""
    writer = live._row_of(states, end)[live.WRITER]
    if writer == text:
        return 2
    return 1 if writer >> live.GROUP_SHIFT == text >> live.GROUP_SHIFT else 0


# --- many places at once ----------------------------------------------------------------------

# A lane is a place in an automaton. Votes are found for many lanes together. The table of lanes is
# int64[lanes, LANE_WIDTH]. Its first four columns are a place's columns from PLACE_HEADER on.
LANE_HEADER, LANE_STATE, LANE_LENGTH, LANE_TEXT = 0, 1, 2, 3
LANE_FIRST = 4  # number of the first class of votes that belongs to the lane's source
LANE_TASKS = 5  # number of suffixes found so far that were continued
LANE_SEEN = 6  # state of the suffix to look at next
LANE_WIDTH = 8
# A task is a suffix of a lane's text that was continued. The table of tasks is
# int64[LEVELS * lanes, TASK_WIDTH].
TASK_STATE, TASK_LENGTH = 0, 1
# The most frequent continuation and the latest one. If they are the same, TASK_LATEST_TARGET is 0,
# a state that no token leads to.
TASK_BEST_TOKEN, TASK_BEST_TARGET = 2, 3
TASK_LATEST_TOKEN, TASK_LATEST_TARGET = 4, 5
TASK_WIDTH = 6
_LANE_BYTES, _TASK_BYTES = 8 * LANE_WIDTH, 8 * TASK_WIDTH


@_inlined
def lane_at(lanes, lane):
    """Return a pointer to a lane; `lanes` is the address of the table of lanes."""
    return live._int64_pointer(lanes + lane * _LANE_BYTES)


@_inlined
def _task_at(tasks, lane, level):
    return live._int64_pointer(tasks + (LEVELS * lane + level) * _TASK_BYTES)


@_inlined
def _begin_task(task, lane, header, state, entry):
    """Write a suffix's continuations to `task`; return False if the suffix has none."""
    states = header[live.STATES]
    task[TASK_STATE] = state
    if state < 0:
        latest, target = np.int64(entry[live.LATEST_TOKEN]), np.int64(entry[live.LATEST_TARGET])
        best, best_target = np.int64(entry[live.BEST_TOKEN]), np.int64(entry[live.BEST_TARGET])
    else:
        # The state is a prefix of a text. Most prefixes have only the edge to the next prefix, so
        # the latest continuation is also the best.
        latest, target = live._latest_of(header, state)
        best, best_target = latest, target
        if entry[live.NEXT_TOKEN] != latest and entry[live.NEXT_TOKEN] != live.NONE:
            after = live._after(states, state)
            if live._times(states, after) > live._times(states, target):
                best, best_target = np.int64(entry[live.NEXT_TOKEN]), after
    if target == 0:
        return False
    live._fetch_state(states, best_target)
    if best == latest:
        target = np.int64(0)
    else:
        live._fetch_state(states, target)
    task[TASK_BEST_TOKEN], task[TASK_BEST_TARGET] = best, best_target
    task[TASK_LATEST_TOKEN], task[TASK_LATEST_TARGET] = latest, target
    if state == lane[LANE_STATE]:
        task[TASK_LENGTH] = lane[LANE_LENGTH]
    else:
        task[TASK_LENGTH] = live._length_of(states, state)
    return True


@njit(nogil=True)
def vote_lanes(lanes, tasks, asked, count, waiting):
    """Find the continuations of many lanes, and write them to their tasks.

    The loop follows one suffix link for each lane in turn, and prefetches the memory that this lane
    needs next, so that the lanes' waits for memory overlap.

    Args:
        lanes, tasks: addresses of the tables of lanes and tasks.
        asked: int64[count or more], indices of the lanes to process.
        count: number of these indices.
        waiting: int64[count or more], scratch space.
    """
    looking = 0
    for n in range(count):
        lane = lane_at(lanes, asked[n])
        lane[LANE_TASKS] = 0
        lane[LANE_SEEN] = lane[LANE_STATE]
        waiting[looking] = asked[n]
        looking += int(lane[LANE_STATE] != 0)
    while looking > 0:
        still = 0
        for n in range(looking):
            number = waiting[n]
            lane = lane_at(lanes, number)
            header = live._int64_pointer(lane[LANE_HEADER])
            states, state, level = header[live.STATES], lane[LANE_SEEN], lane[LANE_TASKS]
            entry = live._at(states, state)
            link = np.int64(entry[live.LINK])
            live._fetch_state(states, link)
            level += int(_begin_task(_task_at(tasks, number, level), lane, header, state, entry))
            lane[LANE_TASKS], lane[LANE_SEEN] = level, link
            waiting[still] = number
            still += int((link != 0) & (level < LEVELS))
        looking = still


@_inlined
def take_votes(lanes, tasks, number, tokens, classes, count):
    """Append votes for continuations that `vote_lanes` found; return the number of all votes."""
    lane = lane_at(lanes, number)
    states = live._int64_pointer(lane[LANE_HEADER])[live.STATES]
    text, first = lane[LANE_TEXT], lane[LANE_FIRST]
    for level in range(lane[LANE_TASKS]):
        task = _task_at(tasks, number, level)
        state, length = task[TASK_STATE], task[TASK_LENGTH]
        entry, target = live._at(states, state), task[TASK_BEST_TARGET]
        best = live._at(states, target)
        is_latest = np.int64(task[TASK_LATEST_TARGET] == 0)
        times = live._times(states, target)
        if state < 0:
            times = max(np.int64(entry[live.BEST_COUNT]), 1)
        total = max(live._count(states, state), times)
        writer = _writer_of(states, live._end_of(entry if is_latest else best), text)
        tokens[count] = task[TASK_BEST_TOKEN]
        classes[count] = first + _class_of(length, total, times, is_latest, writer)
        count += 1
        if is_latest:
            continue
        tokens[count] = task[TASK_LATEST_TOKEN]
        times = live._times(states, task[TASK_LATEST_TARGET])
        writer = _writer_of(states, live._end_of(entry), text)
        classes[count] = first + _class_of(length, total, times, np.int64(1), writer)
        count += 1
    return count


@_inlined
def _drawn_at(address, position, length):
    return live._int32_pointer(address + 4 * interface.DRAWN_WIDTH * (position % length))


@_inlined
def _append_other(lane, states, length, total, target, token, tokens, classes, count):
    times = live._times(states, target)
    writer = _writer_of(states, live._end_of(live._at(states, target)), lane[LANE_TEXT])
    number = _class_of(length, max(total, times), times, np.int64(0), writer)
    tokens[count], classes[count] = token, lane[LANE_FIRST] + number
    return count + 1


@njit(nogil=True)
def take_other_votes(lanes, tasks, number, tokens, classes, count):
    """Append votes for a lane's further continuations, so that a tree can branch.

    Each suffix that `vote_lanes` found gets up to OTHER_VOTES votes. Edges stored in the suffix's
    state come first, then the state's newest edges in the table. Returns the number of all votes.
    """
    lane = lane_at(lanes, number)
    header = live._int64_pointer(lane[LANE_HEADER])
    states = header[live.STATES]
    for level in range(lane[LANE_TASKS]):
        task = _task_at(tasks, number, level)
        state, length = task[TASK_STATE], task[TASK_LENGTH]
        best, latest = task[TASK_BEST_TOKEN], task[TASK_LATEST_TOKEN]
        entry, total = live._at(states, state), max(live._count(states, state), 1)
        stop = count + OTHER_VOTES
        if state < 0:
            for column in live.OWN_EDGE_COLUMNS:
                token, target = np.int64(entry[column]), np.int64(entry[column + 1])
                if target != 0 and token != best and token != latest:
                    count = _append_other(
                        lane, states, length, total, target, token, tokens, classes, count
                    )
        else:
            token, target = np.int64(entry[live.NEXT_TOKEN]), live._after(states, state)
            if token != live.NONE and target != 0 and token != best and token != latest:
                count = _append_other(
                    lane, states, length, total, target, token, tokens, classes, count
                )
        token = np.int64(entry[live.FIRST_EDGE])
        for _ in range(OTHER_VOTES + VOTES_PER_LEVEL):
            if token == live.NONE or count == stop:
                break
            address = live._search_table(header, state, token)
            if address <= 0:
                break
            edge = live._int32_pointer(address)
            if token != best and token != latest:
                target = np.int64(edge[live.TARGET])
                count = _append_other(
                    lane, states, length, total, target, token, tokens, classes, count
                )
            token = np.int64(edge[live.NEXT_EDGE])
    return count


@njit(nogil=True)
def vote(kind, address, state, length, first, tokens, classes, count):
    """Append the votes of a place of any kind but LIVE; return the number of all votes.

    Args:
        kind, address, state, length: columns of the place.
        first: the number of the source's first class.
        tokens, classes: the arrays of votes, to which new votes are appended.
        count: number of votes so far.
    """
    if kind == interface.READY:
        if state < length:
            entry = live._int32_pointer(address + 8 * state)
            tokens[count] = entry[interface.DRAFT_TOKEN]
            certain = entry[interface.CERTAINTY] / interface.CERTAIN
            classes[count] = first + _class_of(state + 1, np.int64(1), certain, np.int64(0), 0)
            count += 1
        return count
    if kind == interface.FOLLOWERS and 0 <= state < length:
        entry = live._int32_pointer(address + 8 * state)
        if entry[interface.FOLLOWER] >= 0:
            tokens[count] = entry[interface.FOLLOWER]
            run = np.int64(entry[interface.RUN])
            classes[count] = first + _class_of(np.int64(1), run, float(run), np.int64(1), 0)
            count += 1
    if kind == interface.DRAWN:
        entry = _drawn_at(address, state >> 1, length)
        if entry[interface.DRAWN_POSITION] == state >> 1:
            tokens[count] = entry[interface.DRAWN_TOKEN]
            # The vote's class encodes DRAWN_DISTANCE, DRAWN_AGAIN, and whether DRAWN_AFTER fits.
            distance = np.int64(entry[interface.DRAWN_DISTANCE])
            votes = distance * (1 - 1 / entry[interface.DRAWN_AGAIN])
            classes[count] = first + _class_of(np.int64(1), distance, votes, state & 1, 0)
            count += 1
    return count


@njit(nogil=True)
def follow(kind, address, state, length, token):
    """Return a place's state and length after one more token.

    If a READY draft does not go on with this token, the length is 0.
    """
    if kind == interface.READY:
        goes_on = state < length and (
            live._int32_pointer(address + 8 * state)[interface.DRAFT_TOKEN] == token
        )
        return (state + 1, length) if goes_on else (state, np.int64(0))
    if kind == interface.FOLLOWERS:
        return np.int64(token), length
    if kind == interface.DRAWN:
        position = (state >> 1) + 1
        entry = _drawn_at(address, position, length)
        return 2 * position + np.int64(
            entry[interface.DRAWN_POSITION] == position and entry[interface.DRAWN_AFTER] == token
        ), length
    header = live._int64_pointer(address)
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


@_inlined
def follow_lane(lanes, tasks, number, token):
    """Move a lane past a token as `follow` does, but use the edges that `vote_lanes` found."""
    lane = lane_at(lanes, number)
    state, length = lane[LANE_STATE], lane[LANE_LENGTH]
    states = live._int64_pointer(lane[LANE_HEADER])[live.STATES]
    entry = live._at(states, state)
    if state > 0 and entry[live.NEXT_TOKEN] == live.NONE and entry[live.FIRST_EDGE] == live.NONE:
        state = np.int64(entry[live.LINK])  # nothing has followed a text's newest prefix yet
        length = live._length_of(states, state)
    for level in range(lane[LANE_TASKS]):
        task = _task_at(tasks, number, level)
        if task[TASK_STATE] != state:
            continue
        found = np.int64(0)
        if task[TASK_BEST_TOKEN] == token:
            found = task[TASK_BEST_TARGET]
        elif task[TASK_LATEST_TARGET] != 0 and task[TASK_LATEST_TOKEN] == token:
            found = task[TASK_LATEST_TARGET]
        if found != 0:
            lane[LANE_STATE], lane[LANE_LENGTH] = found, length + 1
            return
        break
    lane[LANE_STATE], lane[LANE_LENGTH] = follow(
        interface.LIVE, lane[LANE_HEADER], state, length, token
    )
