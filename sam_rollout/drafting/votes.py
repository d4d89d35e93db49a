"""Gathers votes for a text's next token, and learns how much these votes weigh."""

import numpy as np
from numba import njit

from sam_rollout.automaton.continuations import (
    CLASSES,
    LANE_FIRST,
    LANE_HEADER,
    LANE_LENGTH,
    LANE_STATE,
    LENGTH_CLASSES,
    READY_CLASSES,
    SHARES,
    follow,
    follow_lane,
    lane_at,
    take_votes,
    vote,
)
from sam_rollout.automaton.interface import (
    DRAWN,
    FOLLOWERS,
    LIVE,
    NOWHERE,
    PLACE_HEADER,
    PLACE_KIND,
    READY,
)
from sam_rollout.automaton.kernels import _inlined
from sam_rollout.drafting.in_flight import NO_SOURCE

# Assumed shares of right votes in classes without votes. For texts the share rises with the length
# of the suffix. For a model's drafts it is the probability that the model gave the token.
_FIRST_SHARES = np.linspace(0.35, 0.8, LENGTH_CLASSES)
_SAID = np.convolve([0.0, *SHARES, 1.0], [0.5, 0.5], "valid")
_FIRST_WEIGHT = 4.0  # the assumed share weighs like this number of votes
_LARGEST_SHARE = 0.995
_CHANGED = -1.0  # marks a weight that has to be computed again; other weights are not negative
_SHARE_MEMORY = 1 << 12  # counts are halved at this number, to follow a model in training

# Tokens are divided into SUMS classes by the sum of their votes. Each class is SUM_WIDTH wide.
SUMS = 32
SUM_WIDTH = 0.25
# Number of classes of the texts' joint vote; these classes come after those of the sources.
TOGETHER = 2 * SUMS
BORROWED = 8.0  # in an estimate, the wider class's share weighs like this number of tokens
ASSUMED = 4.0  # number of right tokens that a wider class is assumed to have at first
CHANCE_MEMORY = 1 << 14


class Votes:
    """The counts and weights of votes, which an engine's policies for chains and trees share."""

    def __init__(self, sources: int, max_rows: int) -> None:
        each = np.repeat(_FIRST_SHARES, CLASSES // LENGTH_CLASSES)
        each[READY_CLASSES] = _SAID[:, None, None]
        each = np.tile(each, sources)
        sums = SUM_WIDTH * (np.arange(TOGETHER) // 2 + 0.5)
        first = np.minimum(np.concatenate([each, -np.expm1(-sums)]), _LARGEST_SHARE)
        # float64[2, classes], the number of votes of each class, and the number of right votes.
        self.shares = np.array([np.ones_like(first), first]) * _FIRST_WEIGHT
        self.weights = -np.log1p(-first)  # float64[classes], the weight of each class's votes
        self.accepted = np.zeros(max_rows, np.int32)  # accepted tokens of each row's last draft

    def rearrange(self, rows: np.ndarray) -> None:
        """Reorder rows as `DraftBatch.rearrange` does."""
        self.accepted[: len(rows)] = np.where(rows >= 0, self.accepted[rows], 0)


@njit(nogil=True)
def count_in(table, number, is_right, memory):
    """Count a token or a vote in its class, and whether it is right.

    When the class's count reaches `memory`, its counts are halved.
    """
    table[0, number] += 1
    table[1, number] += is_right
    if table[0, number] >= memory:
        table[0, number] *= 0.5
        table[1, number] *= 0.5


@njit(nogil=True)
def count_vote(shares, weights, number, is_right):
    """Count a vote of a class; `weigh` will compute the class's weight."""
    count_in(shares, number, is_right, _SHARE_MEMORY)
    weights[number] = _CHANGED


@njit(nogil=True)
def weigh(shares, weights):
    """Compute the weights of classes with new votes; called once per step."""
    for number in range(weights.size):
        if weights[number] == _CHANGED:
            share = min(shares[1, number] / shares[0, number], _LARGEST_SHARE)
            weights[number] = -np.log1p(-share)


@_inlined
def heaviest_token(tokens, classes, weights, first, stop):
    """Return the first vote for the token with the largest sum of weights, and that sum."""
    best, most = first, -1.0
    for n in range(first, stop):
        weight = 0.0
        for m in range(first, stop):
            if tokens[m] == tokens[n]:
                weight += weights[classes[m]]
        if weight > most:
            best, most = n, weight
    return best, most


@_inlined
def tell_agreement(tokens, classes, weights, texts, other):
    """Increase the class number of the vote at index `other` if texts vote for the same token.

    The votes below index `texts` come from texts. The number rises by 1 if any of these votes is
    for the token, and by 2 if the token has the largest sum of these votes.
    """
    best, _ = heaviest_token(tokens, classes, weights, 0, texts)
    is_named = False
    for n in range(texts):
        is_named |= tokens[n] == tokens[other]
    classes[other] += int(is_named) + int(is_named and tokens[best] == tokens[other])


@_inlined
def put_lanes(i, slot, places, lanes):
    """Set a row's lanes, from number `slot` on, to the places of its text in the sources."""
    for s in range(places.shape[0]):
        if places[s, i, PLACE_KIND] != NOWHERE:
            lane = lane_at(lanes, slot + s)
            for column in range(LANE_FIRST):  # all columns of the place except its kind
                lane[column] = places[s, i, PLACE_HEADER + column]
            lane[LANE_FIRST] = s * CLASSES


@_inlined
def collect(i, first, places, lanes, tasks, tokens, classes, origin, weights):
    """Gather the votes for a row's next token, from texts first, then from drafts made elsewhere.

    Returns the number of votes from texts, and the number of all votes.
    """
    sources, count = places.shape[0], 0
    for s in range(sources):
        kind, slot, before = places[s, i, PLACE_KIND], (i - first) * sources + s, count
        if kind == LIVE:
            count = take_votes(lanes, tasks, slot, tokens, classes, count)
        elif kind == FOLLOWERS:
            count = _vote(kind, lane_at(lanes, slot), tokens, classes, count)
        for n in range(before, count):
            origin[n] = s
    for s in range(sources):
        if places[s, i, PLACE_KIND] == DRAWN:
            before = count
            lane = lane_at(lanes, (i - first) * sources + s)
            count = _vote(DRAWN, lane, tokens, classes, count)
            if count > before:
                origin[before] = s
                tell_agreement(tokens, classes, weights, before, before)
    texts = count
    for s in range(sources):
        if places[s, i, PLACE_KIND] == READY:
            origin[count] = s
            lane = lane_at(lanes, (i - first) * sources + s)
            count = _vote(READY, lane, tokens, classes, count)
    return texts, count


@_inlined
def _vote(kind, lane, tokens, classes, count):
    return vote(
        kind, lane[LANE_HEADER], lane[LANE_STATE], lane[LANE_LENGTH], lane[LANE_FIRST], tokens,
        classes, count,
    )  # fmt: skip


@_inlined
def origin_of(token, sources, tokens, classes, origin, weights, count):
    """Return the source whose votes for a token weigh most."""
    best, heaviest = NO_SOURCE, 0.0
    for s in range(sources):
        weight = 0.0
        for n in range(count):
            if origin[n] == s and tokens[n] == token:
                weight += weights[classes[n]]
        if weight > heaviest:
            best, heaviest = s, weight
    return best


@_inlined
def follow_token(i, first, token, places, lanes, tasks):
    """Advance a row's lanes by the token that was drafted."""
    sources = places.shape[0]
    for s in range(sources):
        kind, slot = places[s, i, PLACE_KIND], (i - first) * sources + s
        if kind == LIVE:
            follow_lane(lanes, tasks, slot, token)
        elif kind != NOWHERE:
            lane = lane_at(lanes, slot)
            lane[LANE_STATE], lane[LANE_LENGTH] = follow(
                kind, lane[LANE_HEADER], lane[LANE_STATE], lane[LANE_LENGTH], token
            )
