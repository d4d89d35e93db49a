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

# Suffixes asked: the longest one that something followed, and the next shorter one that something
# else followed, too.
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
def _times(states, target):
    """How often an edge was followed, as far as it was noted; once at least."""
    return max(np.int64(live._at(states, target)[live.LATEST]) >> COUNT_SHIFT, 1)


@_inlined
def _writer(states, target, text):
    """Whose text followed an edge last, as a class."""
    writer = live._row_of(states, live._end_of(live._at(states, target)))[live.WRITER]
    if writer == text:
        return 2
    return 1 if writer >> live.GROUP_SHIFT == text >> live.GROUP_SHIFT else 0


@_inlined
def _judge(states, state, length, newest, found, branches, text, first, tokens, classes, count):
    """Vote for the most frequent and the latest of a suffix's continuations."""
    total, most, chosen, best = np.int64(0), np.int64(0), np.int64(live.NONE), np.int64(0)
    latest, at_latest = np.int64(0), np.int64(0)  # its votes and target
    for n in range(branches):
        token, target = np.int64(found[2 * n]), np.int64(found[2 * n + 1])
        times = _times(states, target)
        total += times
        if token == newest:
            latest, at_latest = times, target
        if times > most or (times == most and token == newest):
            most, chosen, best = times, token, target
    if chosen == live.NONE:
        return count
    total = max(total, np.int64(live._at(states, state)[live.LATEST]) >> COUNT_SHIFT)
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


# --- many places at once ----------------------------------------------------------------------

# Lanes: places that votes are asked for at once. A lane has a task for each suffix that is asked.
# Rows of the int64 table that `vote_lanes` and `follow_lane` work in, [LANE_COLUMNS, lanes]:
LANE_HEADER, LANE_STATE, LANE_LENGTH, LANE_TEXT = 0, 1, 2, 3  # of the place, as `vote`
LANE_FIRST = 4  # where the class numbers of its source begin
LANE_TASKS = 5  # suffixes that were asked
LANE_SEEN = 6  # state of the suffix that is looked at
LANE_COLUMNS = 7
# Rows of the int64 table of tasks, [TASK_COLUMNS, LEVELS * lanes]; a lane's lie side by side.
TASK_STATE, TASK_LENGTH, TASK_NEWEST = 0, 1, 2
TASK_BRANCHES = 3  # continuations found so far
TASK_TOKEN, TASK_SLOT = 4, 5  # the next one in the edge table, and where its search begins
TASK_ALL = 6  # whether all were found
TASK_COLUMNS = 7
# Of a task: token and target of every continuation compared, int32[tasks, BRANCH_COLUMNS].
_MOST_BRANCHES = COMPARED_BRANCHES + live.CLONE_EDGES
BRANCH_COLUMNS = 2 * _MOST_BRANCHES


@_inlined
def _home_slot(header, state, token):
    """Where the search for an edge begins: the slot's address, prefetched; 0 for none."""
    hashed = live._hash(state, token)
    directory, home = header[live.EDGES], live._home(hashed, header[live.EDGE_SLOTS])
    if header[live.OLD_EDGE_SLOTS] != 0:
        old_home = live._home(hashed, header[live.OLD_EDGE_SLOTS])
        if old_home >= header[live.FRONTIER]:
            directory, home = header[live.OLD_EDGES], old_home
    block = live._int64_pointer(directory)[home >> live.BLOCK_SHIFT]
    if block == 0:
        return np.int64(0)
    address = block + home * live.ENTRY_BYTES
    live._prefetch(address)
    return address


@_inlined
def _add_branch(states, branches, count, token, target):
    live._fetch_state(states, target)
    branches[2 * count] = token
    branches[2 * count + 1] = target
    return count + 1


@njit(nogil=True)
def vote_lanes(lanes, tasks, branches, asked, waiting):
    """Find what followed the suffixes of many places: `_vote_live` for all of them at once.

    Each place waits for memory many times, for one address after the other. Here all places take
    one step at a time and prefetch what the next one needs, so that their waits overlap.

    Args:
        lanes, tasks, branches: see above.
        asked: int64[asked lanes], those that stand in automata that grow.
        waiting: int64[2, tasks], to write to.
    """
    header_of, state_of = lanes[LANE_HEADER], lanes[LANE_STATE]
    left, chains = waiting[0], waiting[1]
    looking, chained = 0, 0
    for n in range(asked.size):
        lane = asked[n]
        lanes[LANE_TASKS, lane] = 0
        lanes[LANE_SEEN, lane] = state_of[lane]
        left[looking] = lane
        looking += state_of[lane] != 0
    while looking > 0:
        for n in range(looking):
            lane = left[n]
            states = live._int64_pointer(header_of[lane])[live.STATES]
            entry = live._at(states, lanes[LANE_SEEN, lane])
            live._fetch_state(states, live._end_of(entry))
            live._fetch_state(states, np.int64(entry[live.LINK]))
        still = 0
        for n in range(looking):
            lane = left[n]
            header = live._int64_pointer(header_of[lane])
            states, state = header[live.STATES], lanes[LANE_SEEN, lane]
            entry = live._at(states, state)
            newest = np.int64(live._at(states, live._end_of(entry))[live.NEXT_TOKEN])
            level = lanes[LANE_TASKS, lane]
            if newest != live.NONE:
                task = LEVELS * lane + level
                level += 1
                lanes[LANE_TASKS, lane] = level
                tasks[TASK_STATE, task] = state
                tasks[TASK_LENGTH, task] = (
                    lanes[LANE_LENGTH, lane]
                    if state == state_of[lane]
                    else live._length_of(states, state)
                )
                tasks[TASK_NEWEST, task] = newest
                found = live._int32_pointer(
                    np.int64(branches.ctypes.data) + task * (4 * BRANCH_COLUMNS)
                )
                count = np.int64(0)
                if state >= 0:
                    token = np.int64(entry[live.NEXT_TOKEN])
                    if token != live.NONE:
                        count = _add_branch(states, found, count, token, live._after(states, state))
                else:
                    for column in (live.OLDEST_TOKEN, live.SECOND_TOKEN):
                        target = np.int64(entry[column + 1])
                        if target != 0:
                            count = _add_branch(states, found, count, entry[column], target)
                tasks[TASK_BRANCHES, task] = count
                token = np.int64(entry[live.FIRST_EDGE])
                tasks[TASK_ALL, task] = token == live.NONE
                if token != live.NONE:
                    tasks[TASK_TOKEN, task] = token
                    tasks[TASK_SLOT, task] = _home_slot(header, state, token)
                    chains[chained] = task
                    chained += 1
            link = np.int64(entry[live.LINK])
            lanes[LANE_SEEN, lane] = link
            left[still] = lane
            still += (link != 0) & (level < LEVELS)
        looking = still
    for _ in range(COMPARED_BRANCHES):
        still = 0
        for n in range(chained):
            task = chains[n]
            header = live._int64_pointer(header_of[task // LEVELS])
            state, token = tasks[TASK_STATE, task], tasks[TASK_TOKEN, task]
            edge = live._int32_pointer(tasks[TASK_SLOT, task])
            if (
                edge[live.SOURCE] != state
                or edge[live.TOKEN] != token
                or edge[live.TARGET] == 0
            ):
                edge = live._int32_pointer(live._search_table(header, state, token))
            found = live._int32_pointer(
                np.int64(branches.ctypes.data) + task * (4 * BRANCH_COLUMNS)
            )
            target = np.int64(edge[live.TARGET])
            tasks[TASK_BRANCHES, task] = _add_branch(
                header[live.STATES], found, tasks[TASK_BRANCHES, task], token, target
            )
            token = np.int64(edge[live.NEXT_EDGE])
            if token == live.NONE:
                tasks[TASK_ALL, task] = 1
                continue
            tasks[TASK_TOKEN, task] = token
            tasks[TASK_SLOT, task] = _home_slot(header, state, token)
            chains[still] = task
            still += 1
        chained = still


@njit(nogil=True)
def take_votes(lanes, tasks, branches, lane, tokens, classes, count):
    """Append what `vote_lanes` found for a lane, as `vote` does."""
    header = live._int64_pointer(lanes[LANE_HEADER, lane])
    states, text, first = header[live.STATES], lanes[LANE_TEXT, lane], lanes[LANE_FIRST, lane]
    for task in range(LEVELS * lane, LEVELS * lane + lanes[LANE_TASKS, lane]):
        found = live._int32_pointer(np.int64(branches.ctypes.data) + task * (4 * BRANCH_COLUMNS))
        count = _judge(
            states, tasks[TASK_STATE, task], tasks[TASK_LENGTH, task], tasks[TASK_NEWEST, task],
            found, tasks[TASK_BRANCHES, task], text, first, tokens, classes, count,
        )  # fmt: skip
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
    lanes, tasks = np.zeros((LANE_COLUMNS, 1), np.int64), np.empty((TASK_COLUMNS, LEVELS), np.int64)
    branches = np.empty((LEVELS, BRANCH_COLUMNS), np.int32)
    lanes[LANE_HEADER, 0], lanes[LANE_STATE, 0], lanes[LANE_LENGTH, 0] = address, state, length
    lanes[LANE_TEXT, 0], lanes[LANE_FIRST, 0] = text, first
    vote_lanes(lanes, tasks, branches, np.zeros(1, np.int64), np.empty((2, LEVELS), np.int64))
    return take_votes(lanes, tasks, branches, 0, tokens, classes, count)


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


@njit(nogil=True)
def follow_lane(lanes, tasks, branches, lane, token):
    """As `follow`, for a lane: mostly `vote_lanes` came by where the token leads."""
    state, length = lanes[LANE_STATE, lane], lanes[LANE_LENGTH, lane]
    address = lanes[LANE_HEADER, lane]
    states = live._int64_pointer(address)[live.STATES]
    entry = live._at(states, state)
    if state > 0 and entry[live.NEXT_TOKEN] == live.NONE and entry[live.FIRST_EDGE] == live.NONE:
        state = np.int64(entry[live.LINK])  # a text's newest prefix: nothing has followed it yet
        length = live._length_of(states, state)
    for task in range(LEVELS * lane, LEVELS * lane + lanes[LANE_TASKS, lane]):
        if tasks[TASK_STATE, task] != state:
            break
        found = live._int32_pointer(np.int64(branches.ctypes.data) + task * (4 * BRANCH_COLUMNS))
        for n in range(tasks[TASK_BRANCHES, task]):
            if found[2 * n] == token:
                return np.int64(found[2 * n + 1]), length + 1
        if tasks[TASK_ALL, task] == 0 or state == 0:
            break
        state = np.int64(live._at(states, state)[live.LINK])
        length = live._length_of(states, state)
    return follow(LIVE, address, state, length, token)
