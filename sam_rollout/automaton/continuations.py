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
from sam_rollout.automaton.kernels import _inlined

# Suffixes asked: the longest one that something followed, and the next shorter one that occurred in
# more places and went on.
LEVELS = 2
VOTES_PER_LEVEL = 2  # the most frequent continuation and, if it is another one, the latest
# Continuations of a state that are compared, the newest first.
COMPARED_BRANCHES = 16

# What is known of a continuation, as a number below CLASSES.
LENGTHS = (2, 3, 5, 9, 20)  # of the suffix: lowest values of the classes but one
COUNTS = (2, 3, 4, 6, 10, 20, 50)  # how often the suffix went on
SHARES = (0.25, 0.4, 0.5, 0.66, 0.8, 0.9)  # how often with this token
WRITERS = 3  # whose text did so last: any other's, that of a sibling, this one's own
LENGTH_CLASSES = len(LENGTHS) + 1
_PER_LENGTH = (len(COUNTS) + 1) * (len(SHARES) + 1) * 2 * WRITERS
CLASSES = LENGTH_CLASSES * _PER_LENGTH


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
def _times(target):
    """How often an edge to the state at an address was followed, as far as noted; once at least."""
    return max(int(live._int32_pointer(target)[live.LATEST]) >> COUNT_SHIFT, 1)


@_inlined
def _writer(states, target, text):
    """Whose text followed an edge to the state at an address last, as a class."""
    writer = live._row_of(states, live._end_of(live._int32_pointer(target)))[live.WRITER]
    if writer == text:
        return 2
    return 1 if writer >> live.GROUP_SHIFT == text >> live.GROUP_SHIFT else 0


# --- many places at once ----------------------------------------------------------------------

# Lanes: places that votes are asked for at once, int64[lanes, LANE_WIDTH]. Columns:
LANE_HEADER, LANE_STATE, LANE_LENGTH, LANE_TEXT = 0, 1, 2, 3  # of the place, as `vote`
LANE_FIRST = 4  # where the class numbers of its source begin
LANE_TASKS = 5  # suffixes that were asked
LANE_SEEN = 6  # state of the suffix that is looked at
LANE_WIDTH = 8
# A lane has a task for each suffix that is asked, int64[LEVELS * lanes, TASK_WIDTH]. Columns:
TASK_HEADER, TASK_STATE = 0, 1
TASK_BRANCHES = 2  # continuations found so far
TASK_TOKEN = 3  # the next one in the edge table
TASK_SLOT = 4  # address where its search begins
TASK_ROOM = 5  # slots from there to a block's end
TASK_ALL = 6  # whether all were found
TASK_LENGTH, TASK_NEWEST = 7, 8
TASK_FOUND = 9  # two words each: token and target in the halves of one, address of the target
TASK_WIDTH = TASK_FOUND + 2 * (COMPARED_BRANCHES + live.CLONE_EDGES)
_TOKEN_MASK = (1 << 32) - 1
_LANE_BYTES, _TASK_BYTES = 8 * LANE_WIDTH, 8 * TASK_WIDTH


@_inlined
def _lane_at(lanes, lane):
    return live._int64_pointer(lanes + lane * _LANE_BYTES)


@_inlined
def _task_at(tasks, lane, level):
    return live._int64_pointer(tasks + (LEVELS * lane + level) * _TASK_BYTES)


@_inlined
def _find_slot(header, task, token):
    """Prefetch where the search for an edge begins, and note it."""
    directory, _, home = live._table_of(header, task[TASK_STATE], token)
    slot = live._int64_pointer(directory)[home >> live.BLOCK_SHIFT] + home * live.ENTRY_BYTES
    live._prefetch(slot)
    live._prefetch(slot + 2 * live.ENTRY_BYTES)  # edges give way to others
    task[TASK_TOKEN], task[TASK_SLOT] = token, slot
    task[TASK_ROOM] = live.BLOCK_ENTRIES - (home & live.BLOCK_MASK)


@_inlined
def _edge_of(header, task):
    """The edge that `_find_slot` was told of: it is there."""
    slot, token, state = task[TASK_SLOT], task[TASK_TOKEN], task[TASK_STATE]
    for _ in range(task[TASK_ROOM]):
        edge = live._int32_pointer(slot)
        if edge[live.SOURCE] == state and edge[live.TOKEN] == token and edge[live.TARGET] != 0:
            return edge
        slot += live.ENTRY_BYTES
    return live._int32_pointer(live._search_table(header, state, token))


@_inlined
def _add_branch(states, task, token, target):
    address = live._address_of(states, target)
    live._prefetch(address)
    at = TASK_FOUND + 2 * task[TASK_BRANCHES]
    task[at], task[at + 1] = (target << 32) | token, address  # tokens are not negative
    task[TASK_BRANCHES] += 1


@_inlined
def _begin_task(lane, task, header, state, newest):
    states = header[live.STATES]
    entry = live._at(states, state)
    task[TASK_HEADER], task[TASK_STATE] = lane[LANE_HEADER], state
    task[TASK_NEWEST], task[TASK_BRANCHES] = newest, 0
    if state == lane[LANE_STATE]:
        task[TASK_LENGTH] = lane[LANE_LENGTH]
    else:
        task[TASK_LENGTH] = live._length_of(states, state)
    if state >= 0:
        if entry[live.NEXT_TOKEN] != live.NONE:
            token = np.int64(entry[live.NEXT_TOKEN])
            _add_branch(states, task, token, live._after(states, state))
    else:
        for column in (live.OLDEST_TOKEN, live.SECOND_TOKEN):
            target = np.int64(entry[column + 1])
            if target != 0:
                _add_branch(states, task, np.int64(entry[column]), target)
    token = np.int64(entry[live.FIRST_EDGE])
    task[TASK_ALL] = token == live.NONE
    if token != live.NONE:
        _find_slot(header, task, token)


@njit(nogil=True)
def vote_lanes(lanes, tasks, asked, count, waiting):
    """Find what followed the suffixes of many places that stand in automata that grow.

    Each place waits for memory many times, for one address after the other. Here all of them take
    one step at a time and prefetch what the next one needs, so that their waits overlap.

    Args:
        lanes, tasks: addresses of the tables above.
        asked: int64[count], lanes to find this for.
        waiting: int64[2, LEVELS * count or more], to write to.
    """
    left, chains = live._pointer_of_row(waiting, 0), live._pointer_of_row(waiting, 1)
    looking, chained = 0, 0
    for n in range(count):
        lane = _lane_at(lanes, asked[n])
        lane[LANE_TASKS] = 0
        lane[LANE_SEEN] = lane[LANE_STATE]
        left[looking] = asked[n]
        looking += int(lane[LANE_STATE] != 0)
    while looking > 0:
        for n in range(looking):
            lane = _lane_at(lanes, left[n])
            states = live._int64_pointer(lane[LANE_HEADER])[live.STATES]
            entry = live._at(states, lane[LANE_SEEN])
            live._fetch_state(states, live._end_of(entry))
            live._fetch_state(states, np.int64(entry[live.LINK]))
        still = 0
        for n in range(looking):
            number = left[n]
            lane = _lane_at(lanes, number)
            header = live._int64_pointer(lane[LANE_HEADER])
            states, state, level = header[live.STATES], lane[LANE_SEEN], lane[LANE_TASKS]
            entry = live._at(states, state)
            newest = np.int64(live._at(states, live._end_of(entry))[live.NEXT_TOKEN])
            if newest != live.NONE:
                task = _task_at(tasks, number, level)
                _begin_task(lane, task, header, state, newest)
                chains[chained] = LEVELS * number + level
                chained += 1 - task[TASK_ALL]
                level += 1
                lane[LANE_TASKS] = level
            lane[LANE_SEEN] = np.int64(entry[live.LINK])
            left[still] = number
            still += int((lane[LANE_SEEN] != 0) & (level < LEVELS))
        looking = still
    for _ in range(COMPARED_BRANCHES):
        still = 0
        for n in range(chained):
            task = _task_at(tasks, 0, chains[n])
            header = live._int64_pointer(task[TASK_HEADER])
            edge = _edge_of(header, task)
            _add_branch(header[live.STATES], task, task[TASK_TOKEN], np.int64(edge[live.TARGET]))
            token = np.int64(edge[live.NEXT_EDGE])
            if token == live.NONE:
                task[TASK_ALL] = 1
                continue
            _find_slot(header, task, token)
            chains[still] = chains[n]
            still += 1
        chained = still


@_inlined
def take_votes(lanes, tasks, number, tokens, classes, count):
    """Append the most frequent and the latest continuations that `vote_lanes` found for a lane."""
    lane = _lane_at(lanes, number)
    states = live._int64_pointer(lane[LANE_HEADER])[live.STATES]
    for level in range(lane[LANE_TASKS]):
        task = _task_at(tasks, number, level)
        newest, total = task[TASK_NEWEST], 0
        # Places of the most frequent one, of two as frequent the latest, and of the latest.
        best, latest, most = 0, 0, 0
        for n in range(task[TASK_BRANCHES]):
            at = TASK_FOUND + 2 * n
            is_newest = task[at] & _TOKEN_MASK == newest
            times = _times(task[at + 1])
            total += times
            latest = at if is_newest else latest
            rank = 2 * times + is_newest
            best = at if rank > most else best
            most = max(most, rank)
        if best == 0:
            continue
        entry = live._at(states, task[TASK_STATE])
        total = max(total, int(entry[live.LATEST]) >> COUNT_SHIFT)
        for n in range(VOTES_PER_LEVEL):
            at = best if n == 0 else latest
            if n > 0 and (latest == 0 or latest == best):
                break
            tokens[count] = task[at] & _TOKEN_MASK
            classes[count] = lane[LANE_FIRST] + _class_of(
                task[TASK_LENGTH], total, _times(task[at + 1]), np.int64(at == latest),
                _writer(states, task[at + 1], lane[LANE_TEXT]),
            )  # fmt: skip
            count += 1
    return count


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
    lane, tasks = np.zeros(LANE_WIDTH, np.int64), np.empty((LEVELS, TASK_WIDTH), np.int64)
    lane[LANE_HEADER], lane[LANE_STATE], lane[LANE_LENGTH] = address, state, length
    lane[LANE_TEXT], lane[LANE_FIRST] = text, first
    lanes_at, tasks_at = np.int64(lane.ctypes.data), np.int64(tasks.ctypes.data)
    vote_lanes(lanes_at, tasks_at, np.zeros(1, np.int64), 1, np.empty((2, LEVELS), np.int64))
    return take_votes(lanes_at, tasks_at, 0, tokens, classes, count)


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


@_inlined
def follow_lane(lanes, tasks, number, token):
    """Let a lane follow a token, as `follow`: mostly `vote_lanes` came by where it leads."""
    lane = _lane_at(lanes, number)
    state, length = lane[LANE_STATE], lane[LANE_LENGTH]
    states = live._int64_pointer(lane[LANE_HEADER])[live.STATES]
    entry = live._at(states, state)
    if state > 0 and entry[live.NEXT_TOKEN] == live.NONE and entry[live.FIRST_EDGE] == live.NONE:
        state = np.int64(entry[live.LINK])  # a text's newest prefix: nothing has followed it yet
        length = live._length_of(states, state)
    found = np.int64(0)
    for level in range(lane[LANE_TASKS]):
        task = _task_at(tasks, number, level)
        if task[TASK_STATE] != state:
            break
        for n in range(task[TASK_BRANCHES]):
            at = TASK_FOUND + 2 * n
            if task[at] & _TOKEN_MASK == token:
                found = task[at] >> 32
        if found != 0 or task[TASK_ALL] == 0:
            break
        state = np.int64(live._at(states, state)[live.LINK])
        length = live._length_of(states, state)
    if found != 0:
        lane[LANE_STATE], lane[LANE_LENGTH] = found, length + 1
    else:
        lane[LANE_STATE], lane[LANE_LENGTH] = follow(LIVE, lane[LANE_HEADER], state, length, token)
