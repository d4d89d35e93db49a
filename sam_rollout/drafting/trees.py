"""Grows trees of draft tokens from the same votes as chains, likeliest token first.

A tree takes the tokens that most likely continue the text. All rows of a step share one budget of
tokens. A token's chance is estimated as for chains (`policy.py`), but from its depth instead of its
position, and also from its rank among the tokens with votes. The estimate is multiplied by
the chance of the token before it in the tree.

The weights of votes are learned at those positions of the text for which the tree had looked up
votes. At these positions, votes for tokens that were not drafted count, too.
"""

import numpy as np
from numba import types

from sam_rollout.automaton.compilation import (
    GIVEN_INT32,
    GIVEN_INT32_2D,
    INT32,
    INT32_2D,
    INT64_2D,
    kernel,
    warm_up,
    written,
)
from sam_rollout.automaton.continuations import (
    LANE_WIDTH,
    LEVELS,
    OTHER_VOTES,
    TASK_WIDTH,
    VOTES_PER_LEVEL,
    take_other_votes,
    vote_lanes,
)
from sam_rollout.automaton.interface import LIVE, PLACE_KIND, Int32Array, Int64Array
from sam_rollout.automaton.kernels import _inlined
from sam_rollout.config import SamConfig
from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered, Verified
from sam_rollout.drafting import votes as voting
from sam_rollout.drafting.in_flight import (
    COUNTS,
    HELD_BACK,
    LENGTH,
    NO_SOURCE,
    SOURCE,
    DraftBatch,
    next_node,
)
from sam_rollout.drafting.policy import DraftPolicy

_FLOATS, _TABLE = written(types.float64), written(types.float64, 2)
_INT32_3D = written(types.int32, 3)

# A token's chance depends on its votes' sum, its rank, its depth, and the previous draft's outcome.
_RANKS, _DEPTHS, _BEFORE = 4, 4, 3
_CHANCE_CLASSES = voting.SUMS * _RANKS * _DEPTHS * _BEFORE
_ASSUMED_OF_OTHERS = 0.15  # assumed chance of a token that is not the likeliest
_LEAST = 1e-3  # tokens with a lower chance are not worth a look-up
_CHILDREN = 8  # maximum number of candidates that follow one token
# A tree branches only after tokens whose chance is at least this number divided by k. After less
# likely tokens, other continuations would hardly be among the tree's k tokens.
_BRANCHES = 0.8
# Up to _AT_ONCE tokens are looked up together, so that their waits for memory overlap. Each has at
# least _NEAR times the chance of the likeliest one.
_AT_ONCE, _NEAR = 8, 0.5
_UNKNOWN, _WRONG = -1, -2  # a token that the text does not judge yet, and a wrong token
# Columns of a candidate.
_ROW, _PARENT, _LOOKUP, _TOKEN = 0, 1, 2, 3


class TreePolicy(DraftPolicy):
    """Drafts trees by vote, and learns from trees that were verified.

    A request's tree has at most `limits.k` tokens. The trees of a step together have at most
    `config.step_budget` tokens.
    """

    def __init__(
        self, config: SamConfig, sources: int, limits: Limits, votes: voting.Votes
    ) -> None:
        super().__init__(config, sources, limits, votes)
        warm_up(_grow, _learn_paths)
        self._least, self._step_budget = max(self._least, _LEAST), config.step_budget
        self._chances_of = np.zeros((2, _CHANCE_CLASSES + voting.SUMS * _RANKS))
        sources, rows = max(sources, 1), limits.max_rows
        lookups = rows + min(self._step_budget, rows * limits.k)
        most_votes = sources * LEVELS * (VOTES_PER_LEVEL + OTHER_VOTES)
        # For each row and each node of its tree: number of the look-up that found the votes for the
        # next token (-1 without a look-up), and the node's depth.
        self._nodes = np.full((rows, 2, limits.k + 1), -1, np.int32)
        # For each look-up: the tokens and classes of its votes.
        self._votes = np.zeros((lookups, 2, most_votes), np.int32)
        self._num_votes = np.zeros(lookups, np.int32)
        self._judged_rows = 0
        # Scratch space.
        self._lanes = np.zeros((lookups * sources, LANE_WIDTH), np.int64)
        self._tasks = np.zeros((LEVELS * lookups * sources, TASK_WIDTH), np.int64)
        longest = max(_AT_ONCE, rows) * sources
        self._lists = np.zeros((7, max(longest, most_votes)), np.int64)
        self._sums = np.zeros(most_votes)
        self._heap = np.zeros((_CHILDREN * lookups, 4), np.int64)
        self._heap_chances = np.zeros(_CHILDREN * lookups)

    def rearrange(self, rows: np.ndarray) -> None:
        """Reorder rows as `DraftBatch.rearrange` does."""
        count = len(rows)
        self._nodes[:count] = self._nodes[rows]
        self._nodes[:count][rows < 0] = -1
        self._chances[:count] = self._chances[rows]

    def learn(self, verified: Verified, token_ids: Int32Array, batch: DraftBatch) -> None:
        """Learn which tokens of the last trees were right; arguments as for `DraftPolicy.learn`."""
        self._judged_rows = _learn_paths(
            token_ids, verified.sampled, verified.source, batch.tokens, batch.parents,
            batch.columns, self._nodes, self._chances, self.votes.accepted, self._votes,
            self._num_votes, self._sums, self._lists, self.votes.shares, self.votes.weights,
            self._chances_of, self._tokens,
        )  # fmt: skip

    def draft(
        self, places: Int64Array, budget: Int32Array, batch: DraftBatch, least_chance: float = 0.0
    ) -> int:
        """Grow a tree for every row, parents before children; see `DraftPolicy.draft`."""
        batch.has_trees = True
        drafted, unknown = _grow(
            places, budget, self._vocab_size, self._step_budget, self._least,
            max(self._least, least_chance), batch.tokens, batch.parents, batch.columns,
            self._nodes, self._chances, self.votes.accepted, self._votes, self._num_votes,
            self.votes.weights, self._chances_of, self._lanes, self._tasks, self._lists,
            self._sums, self._heap, self._heap_chances,
        )  # fmt: skip
        self.warn_of(unknown)
        return drafted

    def offered(self, verified: Verified) -> Offered | None:
        """Return the counts that `learn` has made of the tokens found for the last trees."""
        return Offered(self._judged_rows, self._tokens) if self._tells else None


@_inlined
def _class_of_chance(total, rank, depth, accepted):
    number = np.int64(min(total / voting.SUM_WIDTH, voting.SUMS - 1))
    number = number * _RANKS + min(rank, _RANKS - 1)
    return (number * _DEPTHS + min(depth, _DEPTHS - 1)) * _BEFORE + min(accepted, _BEFORE - 1)


@_inlined
def _wider(number):
    """Return a class's wider class, which holds all tokens with the same sum and rank."""
    return _CHANCE_CLASSES + number // (_DEPTHS * _BEFORE)


@_inlined
def _chance(table, number, rank, total):
    """Estimate a class's share of right tokens from its counts.

    As long as the counts are small, the token's rank and sum of votes decide.
    """
    wider = _wider(number)
    first = _ASSUMED_OF_OTHERS if rank > 0 else min(0.95, -np.expm1(-total))
    share = (table[1, wider] + voting.ASSUMED * first) / (table[0, wider] + voting.ASSUMED)
    return (table[1, number] + voting.BORROWED * share) / (table[0, number] + voting.BORROWED)


@_inlined
def _rank(tokens, classes, weights, count, sums):
    """Sum each token's votes, and return the number of distinct tokens.

    These tokens are moved to the front of `tokens`, heaviest first.
    """
    distinct = 0
    for n in range(count):
        token, weight, at = tokens[n], weights[classes[n]], 0
        while at < distinct and tokens[at] != token:
            at += 1
        if at == distinct:
            tokens[at], sums[at] = token, 0.0
            distinct += 1
        sums[at] += weight
        while at > 0 and sums[at - 1] < sums[at]:
            tokens[at - 1], tokens[at] = tokens[at], tokens[at - 1]
            sums[at - 1], sums[at] = sums[at], sums[at - 1]
            at -= 1
    return distinct


@_inlined
def _push(heap, chances, size, chance, row, parent, lookup, token):
    at = size
    while at > 0 and chances[(at - 1) >> 1] < chance:
        above = (at - 1) >> 1
        chances[at] = chances[above]
        for column in range(4):
            heap[at, column] = heap[above, column]
        at = above
    chances[at] = chance
    heap[at, _ROW], heap[at, _PARENT], heap[at, _LOOKUP], heap[at, _TOKEN] = (
        row, parent, lookup, token,
    )  # fmt: skip
    return size + 1


@_inlined
def _drop_first(heap, chances, size):
    size -= 1
    chance, at = chances[size], 0
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and chances[below + 1] > chances[below]:
            below += 1
        if chances[below] <= chance:
            break
        chances[at] = chances[below]
        for column in range(4):
            heap[at, column] = heap[below, column]
        at = below
    chances[at] = chance
    for column in range(4):
        heap[at, column] = heap[size, column]
    return size


@kernel(
    written(types.int64, 3), INT32, types.int64, types.int64, types.float64, types.float64,
    INT32_2D, INT32_2D, INT32_2D, _INT32_3D, written(types.float32, 2), INT32, _INT32_3D, INT32,
    _FLOATS, _TABLE, INT64_2D, INT64_2D, INT64_2D, _FLOATS, INT64_2D, _FLOATS,
)  # fmt: skip
def _grow(
    places, budget, vocab_size, step_budget, least_offered, least, out_tokens, out_parents,
    out_columns, nodes, chances, accepted, votes, num_votes, weights, chances_of, lanes_of,
    tasks_of, lists, sums, heap, heap_chances,
):  # fmt: skip
    """See `TreePolicy.draft`.

    A look-up finds the votes for the next token after a row's text, or after a token of its tree.
    """
    sources, rows = places.shape[0], budget.size
    lanes, tasks = np.int64(lanes_of.ctypes.data), np.int64(tasks_of.ctypes.data)
    asked, waiting, tokens, classes, origin = lists[0], lists[1], lists[2], lists[3], lists[4]
    counts, held_back = out_columns[COUNTS], out_columns[HELD_BACK]
    lookups = size = drafted = total = unknown = 0
    branches_from = _BRANCHES / out_tokens.shape[1]
    for i in range(rows):
        counts[i] = held_back[i] = 0
        out_columns[SOURCE, i] = NO_SOURCE
        nodes[i] = -1
        if budget[i] < 1:
            continue
        nodes[i, 0, 0], nodes[i, 1, 0] = lookups, 0
        voting.put_lanes(i, lookups * sources, places, lanes)
        heap[lookups, _ROW], heap[lookups, _PARENT] = i, 0  # only to fill `row_of` below
        lookups += 1
    # The row and the node that each new look-up is for.
    row_of, node_of = lists[5], lists[6]
    first = 0
    for n in range(lookups):
        row_of[n], node_of[n] = heap[n, _ROW], 0
    while True:
        count = 0
        for n in range(lookups - first):
            for s in range(sources):
                asked[count] = (first + n) * sources + s
                count += places[s, row_of[n], PLACE_KIND] == LIVE
        vote_lanes(lanes, tasks, asked, count, waiting)
        for number in range(first, lookups):
            i, node = row_of[number - first], node_of[number - first]
            depth, share = nodes[i, 1, node], 1.0
            if node > 0:
                share = chances[i, node - 1]
            count = _named(
                i, number, places, lanes, tasks, tokens, classes, origin, weights,
                share >= branches_from,
            )  # fmt: skip
            num_votes[number] = count
            for n in range(count):
                votes[number, 0, n], votes[number, 1, n] = tokens[n], classes[n]
            distinct = min(_rank(tokens, classes, weights, count, sums), _CHILDREN)
            if node == 0 and count > 0:
                out_columns[SOURCE, i] = voting.origin_of(
                    tokens[0], sources, votes[number, 0], votes[number, 1], origin, weights, count
                )
            expected = 0.0
            for rank in range(distinct):
                kind = _class_of_chance(sums[rank], rank, depth, accepted[i])
                sums[rank] = _chance(chances_of, kind, rank, sums[rank])
                expected += sums[rank]
            share /= max(expected, 1.0)
            for rank in range(distinct):
                if sums[rank] * share >= least_offered:
                    size = _push(
                        heap, heap_chances, size, sums[rank] * share, i, node, number, tokens[rank]
                    )
        first, nearest = lookups, 0.0
        while size > 0 and total < step_budget and lookups - first < _AT_ONCE:
            chance = heap_chances[0]
            if chance < nearest:
                break
            i, parent, number, token = heap[0, 0], heap[0, 1], heap[0, 2], heap[0, 3]
            size = _drop_first(heap, heap_chances, size)
            grown = counts[i] + held_back[i]
            # After a row's draft tokens, at most one token is held back. In a row without draft
            # tokens, more tokens may be held back, up to the row's budget, because
            # `TreePolicy.learn` learns from them.
            if grown >= budget[i] or (counts[i] > 0 and held_back[i] > 0):
                continue
            if not 0 <= token < vocab_size:
                unknown += 1  # the engine's tables have no such token
                continue
            node = grown + 1
            out_tokens[i, node - 1], out_parents[i, node - 1] = token, parent - 1
            chances[i, node - 1] = chance
            nodes[i, 1, node] = nodes[i, 1, parent] + 1
            # In a row, draft tokens come before tokens that are held back.
            is_drafted = held_back[i] == 0 and chance >= least
            counts[i] += is_drafted
            held_back[i] += not is_drafted
            drafted += is_drafted
            total += 1
            nearest = max(nearest, _NEAR * chance)
            if node < budget[i] and total < step_budget:
                for n in range(sources):
                    source, target = number * sources + n, lookups * sources + n
                    lanes_of[target] = lanes_of[source]
                    for level in range(LEVELS):
                        tasks_of[LEVELS * target + level] = tasks_of[LEVELS * source + level]
                voting.follow_token(i, i - lookups, token, places, lanes, tasks)
                nodes[i, 0, node] = lookups
                row_of[lookups - first], node_of[lookups - first] = i, node
                lookups += 1
        if lookups == first and (size == 0 or total >= step_budget):
            break
    return drafted, unknown


@_inlined
def _named(i, number, places, lanes, tasks, tokens, classes, origin, weights, branches):
    """Gather a look-up's votes, with further votes if the tree may branch; return their number."""
    sources = places.shape[0]
    texts, count = voting.collect(
        i, i - number, places, lanes, tasks, tokens, classes, origin, weights
    )
    for n in range(texts, count):
        voting.tell_agreement(tokens, classes, weights, texts, n)
    for s in range(sources):
        if branches and places[s, i, PLACE_KIND] == LIVE:
            before = count
            count = take_other_votes(lanes, tasks, number * sources + s, tokens, classes, count)
            for n in range(before, count):
                origin[n] = s
    return count


@kernel(
    GIVEN_INT32_2D, GIVEN_INT32, INT32, INT32_2D, INT32_2D, INT32_2D, _INT32_3D,
    written(types.float32, 2), INT32, _INT32_3D, INT32, _FLOATS, INT64_2D, _TABLE, _FLOATS, _TABLE,
    _TABLE,
)  # fmt: skip
def _learn_paths(
    token_ids, sampled, source, tokens, parents, columns, nodes, chances, accepted, votes,
    num_votes, sums, lists, shares, weights, chances_of, offered,
):  # fmt: skip
    """See `TreePolicy.learn`; the first pass learns chances, the second pass changes weights."""
    ranked, classes = lists[2], lists[3]
    rows = 0
    offered[:] = 0
    for learns_votes in range(2):
        for i in range(sampled.size):
            start, gained = columns[LENGTH, i], sampled[i]
            if gained < 1 or nodes[i, 0, 0] < 0:
                continue
            rows += learns_votes
            if source[i] == NO_SOURCE:  # no token had a vote
                continue
            node = right = 0
            grown = columns[COUNTS, i] + columns[HELD_BACK, i]
            while right < gained:
                token, number = token_ids[i, start + right], nodes[i, 0, node]
                if number < 0:
                    break
                if learns_votes:
                    for n in range(num_votes[number]):
                        kind = votes[number, 1, n]
                        voting.count_vote(shares, weights, kind, votes[number, 0, n] == token)
                else:
                    for n in range(num_votes[number]):
                        ranked[n], classes[n] = votes[number, 0, n], votes[number, 1, n]
                    distinct = _rank(ranked, classes, weights, num_votes[number], sums)
                    for rank in range(min(distinct, _CHILDREN)):
                        kind = _class_of_chance(sums[rank], rank, nodes[i, 1, node], accepted[i])
                        is_right = ranked[rank] == token
                        voting.count_in(chances_of, kind, is_right, voting.CHANCE_MEMORY)
                        voting.count_in(chances_of, _wider(kind), is_right, voting.CHANCE_MEMORY)
                node = next_node(tokens[i], parents[i], grown, node, token)
                if node == 0:
                    break
                right += 1
            if learns_votes:
                accepted[i] = right
                text = token_ids[i, start:]
                _judge(i, text, gained, tokens, parents, grown, lists[0], chances, offered)
    voting.weigh(shares, weights)
    return rows


@_inlined
def _judge(i, text, gained, tokens, parents, count, state, chances, offered):
    """Add a row's tokens to the counts in `offered`.

    Separate counts are kept of all tokens, of those that the text judges, and of the right ones.
    `text` begins with the tokens that the step sampled; `gained` is their number. `state` is
    scratch space: a right node's depth, or _WRONG or _UNKNOWN for any other node.
    """
    state[0] = 0
    for child in range(count):
        kind, parent = 0, state[parents[i, child] + 1]
        while chances[i, child] < CHANCES[kind]:
            kind += 1
        is_judged = parent == _WRONG or 0 <= parent < gained
        is_right = is_judged and parent >= 0 and text[parent] == tokens[i, child]
        state[child + 1] = parent + 1 if is_right else _WRONG if is_judged else _UNKNOWN
        offered[0, kind] += 1
        offered[1, kind] += is_judged
        offered[2, kind] += is_right
        offered[3, kind] += chances[i, child] * is_judged
