"""Chooses the tokens of draft chains, and learns from their verification.

Each source finds the longest suffix of the request's text and draft that occurs in the source's own
texts (`automaton/continuations.py`). The source votes for the most frequent and the latest token
that followed this suffix, and for two such tokens after the next shorter suffix. Similar votes form
a class. If a share p of a class's votes was right, each vote of the class has the weight
-log(1 - p). The weights of votes for the same token are summed (a noisy-or). The token with the
largest sum is drafted.

Votes of texts are often wrong together, because texts copy the same passages. So if a model also
drafts, all texts together have one vote, for the token with their largest sum. The class of this
vote depends on the sum, and on whether the model names the same token.

A draft goes on while the next token's chance of acceptance reaches a bound, which the gate sets.
With `sam.draft_policy: confidence`, `sam.min_confidence` is a second bound. The first token that
misses a bound is held back. The token that the model samples in its place shows whether the
held-back token was right.

A token's chance of acceptance is a product with one factor for each position of the draft up to the
token. A factor is the share of right tokens in a class. The class depends on the sum of votes, the
position, and how many tokens of the request's previous draft were accepted. If a class has few
tokens, its share is mixed with the share of all tokens with this sum. A factor counts only drafts
that were right up to its position (the product-limit estimate of Kaplan and Meier, 1958).
"""

import logging

import numpy as np
from numba import njit, types

from sam_rollout.automaton import continuations
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
from sam_rollout.automaton.interface import LIVE, PLACE_KIND, Int32Array, Int64Array
from sam_rollout.automaton.kernels import _inlined
from sam_rollout.config import SamConfig
from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered, Verified
from sam_rollout.drafting import votes as voting
from sam_rollout.drafting.in_flight import COUNTS, HELD_BACK, NO_SOURCE, SOURCE, DraftBatch

logger = logging.getLogger(__name__)

_FLOATS, _TABLE = written(types.float64), written(types.float64, 2)

# The class of a token's chance depends on two numbers beside the sum of votes: the token's position
# in the draft (all positions from _POSITIONS - 1 on count as one), and the number of tokens
# accepted from the request's previous draft (all numbers from _BEFORE - 1 on count as one).
_POSITIONS, _BEFORE = 4, 3
_CHANCE_CLASSES = voting.SUMS * _POSITIONS * _BEFORE
_VOTES = 2  # the first column of votes in `DraftPolicy._votes`
_ROWS_AT_ONCE = 32  # number of rows looked up together, so that their waits for memory overlap


class DraftPolicy:
    """Drafts by vote, and learns from drafts that were verified."""

    def __init__(
        self, config: SamConfig, sources: int, limits: Limits, votes: voting.Votes
    ) -> None:
        warm_up(_draft, _learn, _sum_up)
        self._vocab_size, max_rows = limits.vocab_size, limits.max_rows
        self.unknown_tokens = 0  # number of chosen tokens beyond the vocabulary
        self._least = config.min_confidence if config.draft_policy == "confidence" else 0.0
        self._tells = config.gate.kind == "auto"
        self.votes = votes
        # Numbers of drafted and of right tokens, for each class and then for each wider class.
        self._chances_of = np.zeros((2, _CHANCE_CLASSES + voting.SUMS))
        # For each token of the drafts in flight: number of votes for its position, class of its
        # chance, the tokens of these votes, and their classes.
        most_votes = max(sources, 1) * continuations.LEVELS * continuations.VOTES_PER_LEVEL
        self._votes = np.zeros((max_rows, limits.k, _VOTES + 2 * most_votes), np.int32)
        self._chances = np.zeros((max_rows, limits.k), np.float32)  # the tokens' chances
        self._offered = np.zeros(max_rows, np.int32)  # tokens found; -1 for rows without a budget
        self._tokens = np.zeros((4, len(CHANCES)))  # see `Offered`
        # Scratch space.
        lanes = _ROWS_AT_ONCE * max(sources, 1)
        self._lanes = np.zeros((lanes, continuations.LANE_WIDTH), np.int64)
        self._tasks = np.zeros((continuations.LEVELS * lanes, continuations.TASK_WIDTH), np.int64)
        self._lists = np.zeros((6, max(lanes, most_votes)), np.int64)
        self._reached = np.zeros(_ROWS_AT_ONCE)  # chance of each row's draft so far

    def rearrange(self, rows: np.ndarray) -> None:
        """Reorder rows as `DraftBatch.rearrange` does."""
        # A new row, with the old number -1, gets some other row's votes. They do no harm, because
        # `learn` skips rows without a draft, and a draft replaces the votes.
        self._votes[: len(rows)] = self._votes[rows]

    def learn(self, verified: Verified, token_ids: Int32Array, batch: DraftBatch) -> None:
        """Learn which of the last drafts' tokens were right; `token_ids` has the texts."""
        _learn(
            verified.judged, verified.right, verified.source, token_ids,
            batch.length[: len(verified.sampled)], self._votes,
            self.votes.accepted, self.votes.shares, self.votes.weights, self._chances_of,
        )  # fmt: skip

    def draft(
        self, places: Int64Array, budget: Int32Array, batch: DraftBatch, least_chance: float = 0.0
    ) -> int:
        """Draft for every row; return the number of drafted tokens, without those held back.

        Args:
            places: int64[sources, max_rows, PLACE_WIDTH], the place of each row's text in each
                source (`Source.locate`).
            budget: int32[B], maximum number of tokens to draft.
            batch: where to write the drafts and their columns, except `filling` and `length`.
            least_chance: drafts end before tokens with a lower chance of acceptance.
        """
        drafted, unknown = _draft(
            places, budget, self._vocab_size, self._least, max(self._least, least_chance),
            batch.tokens, batch.columns, self._votes, self._chances, self._offered,
            self.votes.accepted, self.votes.weights, self._chances_of, self._lanes, self._tasks,
            self._lists, self._reached,
        )  # fmt: skip
        self.warn_of(unknown)
        return drafted

    def warn_of(self, unknown: int) -> None:
        """Add to the count of tokens beyond the vocabulary; log a warning at the first of them."""
        if unknown:
            if not self.unknown_tokens:
                logger.warning(
                    "A source of drafts says a token id that the model, which has %d, does not "
                    "have. The draft ends before this token, and drafting goes on. Further such "
                    "tokens are only counted (sam/draft/unknown_tokens).",
                    self._vocab_size,
                )
            self.unknown_tokens += unknown

    def offered(self, verified: Verified) -> Offered | None:
        """Return counts of the tokens that the last `draft` found; None if no gate needs them."""
        if not self._tells:
            return None
        rows = _sum_up(
            verified.sampled, verified.judged, verified.right, self._chances, self._offered,
            self._tokens,
        )  # fmt: skip
        return Offered(rows, self._tokens)


@njit(nogil=True)
def _wider(number):
    """Return a class's wider class, which holds all tokens with the same sum of votes."""
    return _CHANCE_CLASSES + number // (_POSITIONS * _BEFORE)


@njit(nogil=True)
def _share(table, number):
    """Estimate a class's share of right tokens; the estimate is 1 before any token is counted."""
    wider = _wider(number)
    share = (table[1, wider] + voting.ASSUMED) / (table[0, wider] + voting.ASSUMED)
    return (table[1, number] + voting.BORROWED * share) / (table[0, number] + voting.BORROWED)


@_inlined
def _unite(tokens, classes, origin, weights, texts, count):
    """Append the joint vote of all texts; return the new number of votes.

    The votes below index `texts` are the texts' separate votes.
    """
    best, most = voting.heaviest_token(tokens, classes, weights, 0, texts)
    for n in range(texts, count):
        voting.tell_agreement(tokens, classes, weights, texts, n)
    number = (
        weights.size - voting.TOGETHER + 2 * np.int64(min(most / voting.SUM_WIDTH, voting.SUMS - 1))
    )
    tokens[count], origin[count] = tokens[best], NO_SOURCE
    classes[count] = number + int(tokens[texts] == tokens[best])
    return count + 1


@_inlined
def _class_of_chance(most, j, accepted):
    """Return the class of a token's chance; `j` is the token's position in the draft.

    `accepted` is the number of tokens accepted from the request's last draft.
    """
    number = np.int64(min(most / voting.SUM_WIDTH, voting.SUMS - 1))
    number = number * _POSITIONS + min(j, _POSITIONS - 1)
    return number * _BEFORE + min(accepted, _BEFORE - 1)


@kernel(
    written(types.int64, 3), INT32, types.int64, types.float64, types.float64, INT32_2D, INT32_2D,
    written(types.int32, 3), written(types.float32, 2), INT32, INT32, _FLOATS, _TABLE, INT64_2D,
    INT64_2D, INT64_2D, _FLOATS,
)  # fmt: skip
def _draft(
    places, budget, vocab_size, least_offered, least, out_tokens, columns, votes, chances, offered,
    accepted, weights, chances_of, lanes_of, tasks_of, lists, reached,
):  # fmt: skip
    """Do the work of `DraftPolicy.draft`; return the numbers of drafted and of unknown tokens.

    A lane is the position in a source's texts that a row's draft has reached. Row `first` + r has
    the lanes from r * sources on. The arguments are separate arrays, because numba reads these
    faster than a tuple.
    """
    sources = places.shape[0]
    lanes, tasks = np.int64(lanes_of.ctypes.data), np.int64(tasks_of.ctypes.data)
    asked, waiting, going = lists[0], lists[1], lists[2]  # `going`: rows whose drafts go on
    tokens, classes, origin = lists[3], lists[4], lists[5]  # the votes for one row's next token
    classes_from = _VOTES + (votes.shape[2] - _VOTES) // 2
    total = unknown = 0
    for first in range(0, budget.size, _ROWS_AT_ONCE):
        rows = j = 0
        for i in range(first, min(first + _ROWS_AT_ONCE, budget.size)):
            columns[COUNTS, i] = columns[HELD_BACK, i] = offered[i] = 0
            columns[SOURCE, i] = NO_SOURCE
            if budget[i] < 1:
                offered[i] = -1
                continue
            going[rows] = i
            rows += 1
            voting.put_lanes(i, (i - first) * sources, places, lanes)
        while rows > 0:
            count = 0
            for n in range(rows):
                i = going[n]
                for s in range(sources):
                    asked[count] = (i - first) * sources + s
                    count += places[s, i, PLACE_KIND] == LIVE
            continuations.vote_lanes(lanes, tasks, asked, count, waiting)
            still = 0
            for at in range(rows):
                i, counted = going[at], 0
                texts, count = voting.collect(
                    i, first, places, lanes, tasks, tokens, classes, origin, weights
                )
                if 0 < texts < count:
                    counted, count = texts, _unite(tokens, classes, origin, weights, texts, count)
                best, most = voting.heaviest_token(tokens, classes, weights, counted, count)
                token = tokens[best]
                if count == 0 or not 0 <= token < vocab_size:
                    unknown += count > 0  # a token outside the vocabulary ends the draft
                    if j == 0:
                        accepted[i] = 0
                    continue
                votes[i, j, 0] = count
                for n in range(count):
                    votes[i, j, _VOTES + n], votes[i, j, classes_from + n] = tokens[n], classes[n]
                if j == 0:
                    columns[SOURCE, i] = voting.origin_of(
                        token, sources, tokens, classes, origin, weights, count
                    )
                votes[i, j, 1] = number = _class_of_chance(most, j, accepted[i])
                chance = _share(chances_of, number)
                if j > 0:
                    chance *= reached[i - first]
                reached[i - first] = chances[i, j] = chance
                out_tokens[i, j] = token
                if chance >= least_offered:
                    offered[i] = j + 1
                if chance < least:
                    columns[HELD_BACK, i] = 1
                    continue
                columns[COUNTS, i] = j + 1
                total += 1
                if j + 1 < budget[i]:
                    going[still] = i
                    still += 1
                    voting.follow_token(i, first, token, places, lanes, tasks)
            rows = still
            j += 1
    return total, unknown


@kernel(
    INT32, INT32, INT32, GIVEN_INT32_2D, GIVEN_INT32, written(types.int32, 3), INT32, _TABLE,
    _FLOATS, _TABLE,
)  # fmt: skip
def _learn(
    judged, right, source, token_ids, length, votes, accepted, shares, weights, chances_of
):  # fmt: skip
    """Count votes and tokens in their classes, and how many of them are right."""
    classes_from = _VOTES + (votes.shape[2] - _VOTES) // 2
    for i in range(source.size):
        if source[i] == NO_SOURCE:
            continue
        for j in range(min(right[i] + 1, judged[i])):
            token, kept = token_ids[i, length[i] + j], votes[i, j]
            for n in range(kept[0]):
                number = kept[classes_from + n]
                voting.count_vote(shares, weights, number, kept[_VOTES + n] == token)
            number, is_right = kept[1], j < right[i]
            voting.count_in(chances_of, number, is_right, voting.CHANCE_MEMORY)
            voting.count_in(chances_of, _wider(number), is_right, voting.CHANCE_MEMORY)
        accepted[i] = right[i]
    voting.weigh(shares, weights)


@kernel(GIVEN_INT32, INT32, INT32, written(types.float32, 2), INT32, _TABLE)
def _sum_up(sampled, judged, right, chances, offered, tokens):
    """Write `Offered.tokens` to `tokens`; return `Offered.rows`."""
    rows = 0
    tokens[:] = 0
    for i in range(sampled.size):
        if sampled[i] < 1 or offered[i] < 0:
            continue
        rows += 1
        class_ = 0
        for position in range(offered[i]):  # chances fall along a draft
            while chances[i, position] < CHANCES[class_]:
                class_ += 1
            tokens[0, class_] += 1
            if position < judged[i]:
                tokens[1, class_] += 1
                tokens[2, class_] += position < right[i]
                tokens[3, class_] += chances[i, position]
    return rows
