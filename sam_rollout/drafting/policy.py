"""Which tokens to draft, how many, and what became of them.

Each token of a draft is a vote. Every source says, from where the text and its draft so far stand
in the source's own texts, what may come next (`automaton/continuations.py`): after the longest
suffix that went on there and after the next shorter one, the most frequent token and the latest.
A vote weighs as much as votes of its class proved right: with a share p of them, -log(1 - p). Equal
tokens add up, as if their votes failed independently (a noisy or), and the token with the largest
sum is drafted. So sources need no order of precedence, and a source is as good as it proves to be.

Texts fail together: they copy the same places. Among themselves that changes little, but their sum
would outvote a model's draft that is right more often. So where a model drafts too, all texts
together cast one vote, for the token with their largest sum. Its class depends on that sum and on
whether the model names the same token. The class of the model's vote tells whether no text names
the model's token, some text does, or it is the first choice of the texts. Joined so, texts
lost nothing beside emulated heads of 2 to 3.6 tokens a step, on responses of real models.

Length: a draft goes on while its next token's chance to be accepted is at least what the gate asks
for (`auto` knows what a token costs) and, with policy `confidence`, `sam.min_confidence`; rows
without such a token get no draft. One token more is drawn and held back: what the model samples in
its place tells whether it would have been right, so that chances are learned where they are too low
to draft, too. The chance is the product over the positions of a draft of the share of right tokens
among those with as large a sum, at about the same position, after a draft of the same request that
did as well; a class with few of them borrows from all with that sum, and these begin with the
assumption that everything is right, so that an engine starts like policy `fixed`. A product of
shares of those that got there is not distorted by drafts that the policy itself ended early (the
product-limit estimate of Kaplan and Meier, 1958).

Nothing about a text or a model is built in but what weighs more at first: all is learned from the
drafts that this engine verified. On responses of real models (greedy replay, all sources, k = 3) a
single rule brings up to 1.4 % of the tokens per verify step; most of all, telling how often a
suffix went on.
"""

import logging
from typing import NamedTuple

import numpy as np
from numba import njit, types

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
    TASK_WIDTH,
    VOTES_PER_LEVEL,
    vote_lanes,
)
from sam_rollout.automaton.interface import (
    LIVE,
    PLACE_KIND,
    Int32Array,
    Int64Array,
)
from sam_rollout.automaton.kernels import _inlined
from sam_rollout.config import SamConfig
from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import CHANCES, Offered, Verified
from sam_rollout.drafting.in_flight import COUNTS, HELD_BACK, NO_SOURCE, SOURCE, DraftBatch
from sam_rollout.drafting.votes import (
    ASSUMED,
    BORROWED,
    CHANCE_MEMORY,
    SUM_WIDTH,
    SUMS,
    TOGETHER,
    Votes,
    collect,
    count_in,
    count_vote,
    follow_token,
    heaviest_token,
    origin_of,
    put_lanes,
    tell_agreement,
    weigh,
)

logger = logging.getLogger(__name__)

_FLOATS, _TABLE = written(types.float64), written(types.float64, 2)

# A token's chance depends on its sum, its position and what was accepted of the draft before.
_POSITIONS, _BEFORE = 4, 3
_CHANCE_CLASSES = SUMS * _POSITIONS * _BEFORE
VOTES = 2  # where the votes begin in what is kept of a token, see `_Drafts`
_ROWS_AT_ONCE = 32  # that wait for memory together, see `vote_lanes`


class DraftPolicy:
    """Drafts by vote, and learns from drafts that were verified.

    Args:
        config: validated.
        sources: how many there are.
        limits: of the engine; no draft holds a token beyond the vocabulary, whatever sources say.
        votes: shared with another policy of the engine; None for its own.

    Attributes:
        unknown_tokens: others that won a vote; the draft ended before them.
        votes: what it knows of them.
    """

    def __init__(
        self, config: SamConfig, sources: int, limits: Limits, votes: Votes | None = None
    ) -> None:
        warm_up(_draft, _learn, _sum_up)
        self._vocab_size, max_rows = limits.vocab_size, limits.max_rows
        self.unknown_tokens = 0
        positions = limits.k
        self._least = config.min_confidence if config.draft_policy == "confidence" else 0.0
        self._tells = config.gate.kind == "auto"
        self.votes = votes or Votes(sources, max_rows)
        # How many drafted tokens there were, and how many were right, by class and by sum alone.
        self._chances_of = np.zeros((2, _CHANCE_CLASSES + SUMS))
        # Votes and chances of the drafts in flight.
        most_votes = max(sources, 1) * LEVELS * VOTES_PER_LEVEL
        self._votes = np.zeros((max_rows, positions, VOTES + 2 * most_votes), np.int32)
        self._chances = np.zeros((max_rows, positions), np.float32)  # of being accepted
        self._offered = np.zeros(max_rows, np.int32)  # tokens of each row, see `_Drafts`
        self._tokens = np.zeros((4, len(CHANCES)))  # see `Offered`
        # To write to: see `_Room`.
        lanes = _ROWS_AT_ONCE * max(sources, 1)
        self._lanes = np.zeros((lanes, LANE_WIDTH), np.int64)
        self._tasks = np.zeros((LEVELS * lanes, TASK_WIDTH), np.int64)
        self._lists = np.zeros((6, max(lanes, most_votes)), np.int64)
        self._reached = np.zeros(_ROWS_AT_ONCE)

    def rearrange(self, rows: np.ndarray) -> None:
        """Follow a changed batch while there are drafts to be judged, whose votes have to follow.

        Args:
            rows: int[B], each row's former place, -1 for none.
        """
        self._votes[: len(rows)] = self._votes[rows]  # without a draft none is judged

    def learn(self, verified: Verified, token_ids: Int32Array, batch: DraftBatch) -> None:
        """Learn what was right of the last drafts.

        Args:
            verified: what became of them.
            token_ids: int32[R >= B, L], row i begins with the text of request i.
            batch: the drafts.
        """
        _learn(
            verified.judged, verified.right, verified.source, token_ids,
            batch.length[: len(verified.sampled)], self._votes,
            self.votes.accepted, self.votes.shares, self.votes.weights, self._chances_of,
        )  # fmt: skip

    def draft(
        self,
        places: Int64Array,
        budget: Int32Array,
        batch: DraftBatch,
        least_chance: float = 0.0,
    ) -> int:
        """Draft for every row; return how many tokens that were, held back ones left out.

        Args:
            places: int64[sources, max_rows, PLACE_WIDTH], where the texts stand in each source.
            budget: int32[B], most tokens to draft.
            batch: to be filled: tokens, how many of them are drafted and held back, and the source
                whose votes for the first token weighed most, NO_SOURCE where there was none.
            least_chance: of a token that is worth its time.
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
        """Count tokens that the model does not have; name the first."""
        if unknown:
            if not self.unknown_tokens:
                logger.warning(
                    "A source of drafts says a token id that the model, which has %d, does not "
                    "have. The draft ends before it, drafting goes on; others are counted "
                    "(sam/draft/unknown_tokens).",
                    self._vocab_size,
                )
            self.unknown_tokens += unknown

    def offered(self, verified: Verified) -> Offered | None:
        """What the last plan could have drafted, rows as they were then; None if no gate asks."""
        if not self._tells:
            return None
        rows = _sum_up(
            verified.sampled, verified.judged, verified.right, self._chances, self._offered,
            self._tokens,
        )  # fmt: skip
        return Offered(rows, self._tokens)


@njit(nogil=True)
def _wider(number):
    """The class of all tokens with the sum of a class."""
    return _CHANCE_CLASSES + number // (_POSITIONS * _BEFORE)


@njit(nogil=True)
def _share(table, number):
    """Estimate the share of right tokens of a class; at first all are assumed to be right."""
    wider = _wider(number)
    share = (table[1, wider] + ASSUMED) / (table[0, wider] + ASSUMED)
    return (table[1, number] + BORROWED * share) / (table[0, number] + BORROWED)


class _Ask(NamedTuple):
    """What is asked of a call."""

    places: np.ndarray  # int64[sources, max_rows, PLACE_WIDTH]
    budget: np.ndarray  # int32[B], most tokens of each row
    vocab_size: int
    least_offered: float  # chance of a token that counts as offered
    least: float  # of one that is drafted


class _Drafts(NamedTuple):
    """What a call writes of each row, to be handed over or to be learned from."""

    tokens: np.ndarray  # int32[max_rows, k], drafted ones and, behind them, one held back
    columns: np.ndarray  # int32[5, max_rows], see `DraftBatch`
    # int32[max_rows, k, VOTES + 2 n] of each token: how many votes it was chosen from, the class of
    # its chance, then the tokens and, n places behind them, the classes of these votes.
    votes: np.ndarray
    chances: np.ndarray  # float32[max_rows, k], of each token
    offered: np.ndarray  # int32[max_rows], tokens offered, -1 where none was asked for
    accepted: np.ndarray  # int32[max_rows], tokens accepted of the request's draft before


class _Room(NamedTuple):
    """Room to work in. A lane is the place that a row's draft has reached in a source.

    The lane of the call's row r and source s is r * sources + s.
    """

    lanes: np.int64  # address of int64[lanes, LANE_WIDTH], see `vote_lanes`
    tasks: np.int64  # address of int64[LEVELS * lanes, TASK_WIDTH]
    asked: np.ndarray  # int64, lanes to be asked together
    waiting: np.ndarray  # int64, for `vote_lanes`
    going: np.ndarray  # int64, rows whose drafts go on
    tokens: np.ndarray  # int64, of the votes for one row's next token
    classes: np.ndarray  # int64, of these votes
    origin: np.ndarray  # int64, whose they are
    reached: np.ndarray  # float64[_ROWS_AT_ONCE], chance of each row's draft so far


@_inlined
def _unite(tokens, classes, origin, weights, texts, count):
    """Append the one vote of all texts, whose own come first; return the number of votes now."""
    best, most = heaviest_token(tokens, classes, weights, 0, texts)
    for n in range(texts, count):
        tell_agreement(tokens, classes, weights, texts, n)
    number = weights.size - TOGETHER + 2 * np.int64(min(most / SUM_WIDTH, SUMS - 1))
    tokens[count], origin[count] = tokens[best], NO_SOURCE
    classes[count] = number + int(tokens[texts] == tokens[best])
    return count + 1


@_inlined
def _begin(first, stop, ask, drafts, room):
    """Put the rows `first` to `stop` at their places; return how many are to be drafted for."""
    places, budget, columns, offered = ask.places, ask.budget, drafts.columns, drafts.offered
    going, sources, rows = room.going, places.shape[0], 0
    for i in range(first, stop):
        columns[COUNTS, i] = columns[HELD_BACK, i] = offered[i] = 0
        columns[SOURCE, i] = NO_SOURCE
        if budget[i] < 1:
            offered[i] = -1
            continue
        going[rows] = i
        rows += 1
        put_lanes(i, (i - first) * sources, places, room.lanes)
    return rows


@_inlined
def _ask_growing(rows, first, places, room):
    """Look up, for all rows together, what followed in the automata that grow."""
    going, asked, sources, count = room.going, room.asked, places.shape[0], 0
    for n in range(rows):
        i = going[n]
        for s in range(sources):
            asked[count] = (i - first) * sources + s
            count += places[s, i, PLACE_KIND] == LIVE
    vote_lanes(room.lanes, room.tasks, asked, count, room.waiting)


@_inlined
def _keep_votes(votes, i, j, tokens, classes, count):
    """Keep the votes for token `j` of row `i`, to be judged by what the text does."""
    votes[i, j, 0] = count
    classes_from = VOTES + (votes.shape[2] - VOTES) // 2
    for n in range(count):
        votes[i, j, VOTES + n] = tokens[n]
        votes[i, j, classes_from + n] = classes[n]


@_inlined
def _class_of_chance(most, j, accepted):
    """The class of a token by its sum, its position and what was accepted of the draft before."""
    number = np.int64(min(most / SUM_WIDTH, SUMS - 1))
    number = number * _POSITIONS + min(j, _POSITIONS - 1)
    return number * _BEFORE + min(accepted, _BEFORE - 1)


@kernel(
    written(types.int64, 3), INT32, types.int64, types.float64, types.float64, INT32_2D, INT32_2D,
    written(types.int32, 3), written(types.float32, 2), INT32, INT32, _FLOATS, _TABLE, INT64_2D,
    INT64_2D, INT64_2D, _FLOATS,
)  # fmt: skip
def _draft(
    places, budget, vocab_size, least_offered, least, out_tokens, out_columns, votes, chances,
    offered, accepted, weights, chances_of, lanes, tasks, lists, reached,
):  # fmt: skip
    """See `DraftPolicy.draft`, and the tuples below for what the arrays hold.

    They come one by one because numba takes microseconds to look through a tuple from Python.
    Returns the number of tokens drafted, and of unknown ones that were not.
    """
    ask = _Ask(places, budget, vocab_size, least_offered, least)
    drafts = _Drafts(out_tokens, out_columns, votes, chances, offered, accepted)
    room = _Room(
        np.int64(lanes.ctypes.data), np.int64(tasks.ctypes.data), lists[0], lists[1], lists[2],
        lists[3], lists[4], lists[5], reached,
    )  # fmt: skip
    total = unknown = 0
    for first in range(0, budget.size, _ROWS_AT_ONCE):
        stop = min(first + _ROWS_AT_ONCE, budget.size)
        drafted, not_drafted = _draft_some(first, stop, ask, drafts, weights, chances_of, room)
        total += drafted
        unknown += not_drafted
    return total, unknown


@_inlined
def _draft_some(first, stop, ask, drafts, weights, chances_of, room):
    """The same for the rows `first` to `stop`, one position after the other for all of them."""
    # Taken out of the tuples here: numba counts references wherever one is.
    places, budget, lanes, tasks = ask.places, ask.budget, room.lanes, room.tasks
    tokens, classes, origin = room.tokens, room.classes, room.origin
    going, reached = room.going, room.reached
    out_tokens, columns, votes = drafts.tokens, drafts.columns, drafts.votes
    chances, offered, accepted = drafts.chances, drafts.offered, drafts.accepted
    total = unknown = j = 0
    rows = _begin(first, stop, ask, drafts, room)
    while rows > 0:
        _ask_growing(rows, first, places, room)
        still = 0
        for at in range(rows):
            i, counted = going[at], 0
            texts, count = collect(i, first, places, lanes, tasks, tokens, classes, origin, weights)
            if 0 < texts < count:
                counted, count = texts, _unite(tokens, classes, origin, weights, texts, count)
            best, most = heaviest_token(tokens, classes, weights, counted, count)
            token = tokens[best]
            if count == 0 or not 0 <= token < ask.vocab_size:
                unknown += count > 0  # the engine would look it up beyond its tables
                if j == 0:
                    accepted[i] = 0
                continue
            _keep_votes(votes, i, j, tokens, classes, count)
            if j == 0:
                columns[SOURCE, i] = origin_of(
                    token, places.shape[0], tokens, classes, origin, weights, count
                )
            votes[i, j, 1] = number = _class_of_chance(most, j, accepted[i])
            chance = _share(chances_of, number)
            if j > 0:
                chance *= reached[i - first]
            reached[i - first] = chances[i, j] = chance
            out_tokens[i, j] = token
            if chance >= ask.least_offered:
                offered[i] = j + 1
            if chance < ask.least:
                columns[HELD_BACK, i] = 1
                continue
            columns[COUNTS, i] = j + 1
            total += 1
            if j + 1 < budget[i]:
                going[still] = i
                still += 1
                follow_token(i, first, token, places, lanes, tasks)
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
    """Count what was right of drafts: votes by class, and tokens by class of their chance."""
    classes_from = VOTES + (votes.shape[2] - VOTES) // 2
    for i in range(source.size):
        if source[i] == NO_SOURCE:
            continue
        for j in range(min(right[i] + 1, judged[i])):
            token, kept = token_ids[i, length[i] + j], votes[i, j]
            for n in range(kept[0]):
                number = kept[classes_from + n]
                count_vote(shares, weights, number, kept[VOTES + n] == token)
            number, is_right = kept[1], j < right[i]
            count_in(chances_of, number, is_right, CHANCE_MEMORY)
            count_in(chances_of, _wider(number), is_right, CHANCE_MEMORY)
        accepted[i] = right[i]
    weigh(shares, weights)


@kernel(GIVEN_INT32, INT32, INT32, written(types.float32, 2), INT32, _TABLE)
def _sum_up(sampled, judged, right, chances, offered, tokens):
    """Fill `tokens`, as `Offered` has them, and return the requests."""
    rows = 0
    tokens[:] = 0
    for i in range(sampled.size):
        if sampled[i] < 1 or offered[i] < 0:
            continue
        rows += 1
        class_ = 0
        for position in range(offered[i]):  # chances fall
            while chances[i, position] < CHANCES[class_]:
                class_ += 1
            tokens[0, class_] += 1
            if position < judged[i]:
                tokens[1, class_] += 1
                tokens[2, class_] += position < right[i]
                tokens[3, class_] += chances[i, position]
    return rows
