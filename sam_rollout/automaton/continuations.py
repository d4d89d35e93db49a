"""What may follow a text, by the suffixes of it that an automaton knows, and where a token leads.

A place is where a text stands in an automaton: the state of its longest suffix there. Drafting goes
on from a place token by token without changing the automaton, so that several automata can be asked
for every token of one draft. `drafting/policy.py` weighs what they say.
"""

import numpy as np
from numba import njit

from sam_rollout.automaton import kernels as live
from sam_rollout.automaton.interface import (
    CERTAIN,
    CERTAINTY,
    DRAFT_TOKEN,
    DRAWN,
    DRAWN_AFTER,
    DRAWN_AGAIN,
    DRAWN_DISTANCE,
    DRAWN_POSITION,
    DRAWN_TOKEN,
    DRAWN_WIDTH,
    FOLLOWER,
    FOLLOWERS,
    LIVE,
    READY,
    RUN,
)
from sam_rollout.automaton.kernels import _inlined

# Suffixes asked: the longest one that something followed, and the next shorter one that occurred in
# more places and went on.
LEVELS = 2
VOTES_PER_LEVEL = 2  # the most frequent continuation and, if it is another one, the latest
OTHER_VOTES = 6  # more of a suffix, where drafts may branch

# What is known of a continuation, as a number below CLASSES.
LENGTHS = (2, 3, 5, 9, 20)  # of the suffix: lowest values of the classes but one
COUNTS = (2, 3, 4, 6, 10, 20, 50)  # how often the suffix went on
SHARES = (0.25, 0.4, 0.5, 0.66, 0.8, 0.9)  # how often with this token
WRITERS = 3  # whose text did so last: any other's, that of a sibling, this one's own
LENGTH_CLASSES = len(LENGTHS) + 1
_PER_LENGTH = (len(COUNTS) + 1) * (len(SHARES) + 1) * 2 * WRITERS
CLASSES = LENGTH_CLASSES * _PER_LENGTH
_ALL = np.arange(CLASSES).reshape(LENGTH_CLASSES, len(COUNTS) + 1, len(SHARES) + 1, 2, WRITERS)
# Those of drafts made elsewhere, by how certain they were, [SHARES + 1, ...]. What went on once
# went on so last, too: no text has a class that says otherwise.
READY_CLASSES = _ALL[:, 0, :, 0].swapaxes(0, 1)


@_inlined
def _class_in(value, lowest):
    number = 0
    for bound in lowest:  # without a jump: it would be guessed wrong often
        number += value >= bound
    return number


@_inlined
def _class_of(length, count, votes, is_latest, writer):
    number = _class_in(length, LENGTHS) * (len(COUNTS) + 1) + _class_in(count, COUNTS)
    number = number * (len(SHARES) + 1) + _class_in(votes / count, SHARES)
    return (2 * number + is_latest) * WRITERS + writer


@_inlined
def _writer_of(states, end, text):
    """Who wrote a prefix, as a class."""
    writer = live._row_of(states, end)[live.WRITER]
    if writer == text:
        return 2
    return 1 if writer >> live.GROUP_SHIFT == text >> live.GROUP_SHIFT else 0


# --- many places at once ----------------------------------------------------------------------

# Lanes: places that votes are asked for at once, int64[lanes, LANE_WIDTH]. Columns:
LANE_HEADER, LANE_STATE, LANE_LENGTH, LANE_TEXT = 0, 1, 2, 3  # of the place
LANE_FIRST = 4  # where the class numbers of its source begin
LANE_TASKS = 5  # suffixes that were asked
LANE_SEEN = 6  # state of the suffix that is looked at
LANE_WIDTH = 8
# A lane has a task for each suffix that is asked, int64[LEVELS * lanes, TASK_WIDTH]. Columns:
TASK_STATE, TASK_LENGTH = 0, 1
# Its most frequent continuation and the latest one: where both are the same, the target of the
# latest is 0, a state that no token leads to.
TASK_BEST_TOKEN, TASK_BEST_TARGET = 2, 3
TASK_LATEST_TOKEN, TASK_LATEST_TARGET = 4, 5
TASK_WIDTH = 6
_LANE_BYTES, _TASK_BYTES = 8 * LANE_WIDTH, 8 * TASK_WIDTH


@_inlined
def lane_at(lanes, lane):
    """Pointer to a lane; `lanes` is the address of their table."""
    return live._int64_pointer(lanes + lane * _LANE_BYTES)


@_inlined
def _task_at(tasks, lane, level):
    return live._int64_pointer(tasks + (LEVELS * lane + level) * _TASK_BYTES)


@_inlined
def _begin_task(task, lane, header, state, entry):
    """Note how a suffix went on; return whether it did."""
    states = header[live.STATES]
    task[TASK_STATE] = state
    if state < 0:
        latest, target = np.int64(entry[live.LATEST_TOKEN]), np.int64(entry[live.LATEST_TARGET])
        best, best_target = np.int64(entry[live.BEST_TOKEN]), np.int64(entry[live.BEST_TARGET])
    else:  # few prefixes have edges beside their run's
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
    """Find what followed the suffixes of many places that stand in automata that grow.

    Each place waits for memory several times, for one address after the other. Here all of them
    take one step at a time and prefetch what the next one needs, so that their waits overlap.

    Args:
        lanes, tasks: addresses of the tables above.
        asked: int64[count], lanes to find this for.
        waiting: int64[count or more], to write to.
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
    """Append the most frequent and the latest continuations that `vote_lanes` found for a lane."""
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
    return live._int32_pointer(address + 4 * DRAWN_WIDTH * (position % length))


@_inlined
def _append_other(lane, states, length, total, target, token, tokens, classes, count):
    times = live._times(states, target)
    writer = _writer_of(states, live._end_of(live._at(states, target)), lane[LANE_TEXT])
    number = _class_of(length, max(total, times), times, np.int64(0), writer)
    tokens[count], classes[count] = token, lane[LANE_FIRST] + number
    return count + 1


@njit(nogil=True)
def take_other_votes(lanes, tasks, number, tokens, classes, count):
    """Append what else followed the suffixes that `vote_lanes` found for a lane, for branches.

    Beyond the most frequent and the latest continuation, up to OTHER_VOTES a suffix: those that the
    state itself holds, then those that were new last.
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
    """Append what may follow a place of any kind but LIVE: those are asked by `vote_lanes`.

    Args:
        kind, address, state, length: of the place.
        first: where the class numbers of the source begin.
        tokens, classes: of the votes so far, to be appended to.
        count: number of votes so far.

    Returns:
        The number of votes now.
    """
    if kind == READY:
        if state < length:
            entry = live._int32_pointer(address + 8 * state)
            tokens[count] = entry[DRAFT_TOKEN]
            certain = entry[CERTAINTY] / CERTAIN
            classes[count] = first + _class_of(state + 1, np.int64(1), certain, np.int64(0), 0)
            count += 1
        return count
    if kind == FOLLOWERS and 0 <= state < length:
        entry = live._int32_pointer(address + 8 * state)
        if entry[FOLLOWER] >= 0:
            tokens[count] = entry[FOLLOWER]
            run = np.int64(entry[RUN])
            classes[count] = first + _class_of(np.int64(1), run, float(run), np.int64(1), 0)
            count += 1
    if kind == DRAWN:
        entry = _drawn_at(address, state >> 1, length)
        if entry[DRAWN_POSITION] == state >> 1:
            tokens[count] = entry[DRAWN_TOKEN]
            # Its class tells the distance, whether it was drawn after this token, and how often.
            distance, again = np.int64(entry[DRAWN_DISTANCE]), entry[DRAWN_AGAIN]
            votes = distance * (1 - 1 / again)
            classes[count] = first + _class_of(np.int64(1), distance, votes, state & 1, 0)
            count += 1
    return count


@njit(nogil=True)
def follow(kind, address, state, length, token):
    """Where a token leads from a place: state and length of the longest suffix then.

    A draft made elsewhere has no more to say where it was not followed.
    """
    if kind == READY:
        goes_on = state < length and (
            live._int32_pointer(address + 8 * state)[DRAFT_TOKEN] == token
        )
        return (state + 1, length) if goes_on else (state, np.int64(0))
    if kind == FOLLOWERS:
        return np.int64(token), length
    if kind == DRAWN:
        position = (state >> 1) + 1
        entry = _drawn_at(address, position, length)
        return 2 * position + np.int64(
            entry[DRAWN_POSITION] == position and entry[DRAWN_AFTER] == token
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
    """Let a lane follow a token, as `follow`: mostly `vote_lanes` came by where it leads."""
    lane = lane_at(lanes, number)
    state, length = lane[LANE_STATE], lane[LANE_LENGTH]
    states = live._int64_pointer(lane[LANE_HEADER])[live.STATES]
    entry = live._at(states, state)
    if state > 0 and entry[live.NEXT_TOKEN] == live.NONE and entry[live.FIRST_EDGE] == live.NONE:
        state = np.int64(entry[live.LINK])  # a text's newest prefix: nothing has followed it yet
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
    lane[LANE_STATE], lane[LANE_LENGTH] = follow(LIVE, lane[LANE_HEADER], state, length, token)
