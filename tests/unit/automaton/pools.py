from typing import NamedTuple

import numpy as np

from sam_rollout.automaton import continuations, interface

_CLASSES = (
    continuations.LENGTH_CLASSES,
    len(continuations.COUNTS) + 1,
    len(continuations.SHARES) + 1,
    2,
    continuations.WRITERS,
)


class Vote(NamedTuple):
    token: int
    length: int
    count: int
    share: int
    is_latest: int
    writer: int

    @classmethod
    def of(cls, token, length, count, times, is_latest, writer):
        bounds = continuations.LENGTHS, continuations.COUNTS, continuations.SHARES
        values = length, count, times / count
        classes = [
            sum(value >= lowest for lowest in bound)
            for value, bound in zip(values, bounds, strict=True)
        ]
        return cls(token, *classes, int(is_latest), writer)


def int32(*values):
    return np.array(values, np.int32)


def read(pool, slot, text, length):
    pool.extend(int32(slot), int32(0), np.asarray(text, np.int32)[None], int32(length))


def places_of(pool, *slots):
    """Return each slot's position in the automaton, int64[slots, PLACE_WIDTH]."""
    places = np.zeros((len(slots), interface.PLACE_WIDTH), np.int64)
    pool.place_rows(int32(*slots), places)
    return places


def votes_at(place):
    if place[interface.PLACE_KIND] == interface.NOWHERE:
        return []
    tokens, classes = np.zeros((2, continuations.LEVELS * continuations.VOTES_PER_LEVEL), np.int64)
    if place[interface.PLACE_KIND] == interface.LIVE:
        lanes = np.zeros((1, continuations.LANE_WIDTH), np.int64)
        tasks = np.zeros((continuations.LEVELS, continuations.TASK_WIDTH), np.int64)
        lanes[0, : continuations.LANE_TEXT + 1] = place[1:]  # a lane has these columns, too
        addresses = lanes.ctypes.data, tasks.ctypes.data
        continuations.vote_lanes(*addresses, np.zeros(1, np.int64), 1, np.zeros(1, np.int64))
        count = continuations.take_votes(*addresses, 0, tokens, classes, 0)
    else:
        count = continuations.vote(*map(int, place[: interface.PLACE_TEXT]), 0, tokens, classes, 0)
    columns = np.unravel_index(classes[:count], _CLASSES)
    return [Vote(*map(int, row)) for row in zip(tokens, *columns, strict=False)]


def votes_of(pool, slot):
    return votes_at(places_of(pool, slot)[0])


def followed(place, token):
    place = np.array(place)
    columns = [interface.PLACE_STATE, interface.PLACE_LENGTH]
    place[columns] = continuations.follow(*map(int, (*place[: interface.PLACE_LENGTH + 1], token)))
    return place


def draft_from(place, k):
    """Return up to `k` tokens, each the most frequent one after the longest known suffix."""
    tokens = []
    while len(tokens) < k and (votes := votes_at(place)):
        tokens.append(votes[0].token)
        place = followed(place, tokens[-1])
    return tokens


def draft_rows(pool, slots, token_ids, lengths, k=3):
    """Read a row of `token_ids` for each slot, up to the row's length; draft what follows it."""
    pool.extend(int32(*slots), np.arange(len(slots), dtype=np.int32), token_ids, int32(*lengths))
    return [draft_from(place, k) for place in places_of(pool, *slots)]


def draft(pool, slot, text, length, k):
    return draft_rows(pool, [slot], np.asarray(text, np.int32)[None], [length], k)[0]
