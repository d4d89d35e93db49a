"""Which source a row drafts from, how many tokens, and what became of them.

Choice: of the sources that compete (own text and siblings), the one of whose draft more tokens are
expected to be accepted, by the chances described below; while nothing is known of them, the longer
match. Another source needs a match that is longer than all before it, by more than its bias. A tie
goes to the source named first.

Length: a draft goes on while its next token's chance to be accepted is at least what the gate asks
for (`auto` knows what a token costs) and, with policy `confidence`, `sam.min_confidence`; rows
without such a token get no draft. One token more is drawn and held back: what the model samples in
its place tells whether it would have been right, so that chances are learned where they are too low
to draft, too. Nothing about a text or a model is built in: chances come from the
drafts that this engine verified so far. Drafts are classed by what is known when they are made:
their source, the length of the match, how many tokens have followed it, whether the one drafted was
confirmed, how far back it lies, and how much of the request's previous draft was accepted. For each
class and position two numbers are kept: how often a draft got there, and how often the token there
was right. The chance of a position is the product of these shares up to there, the product-limit
estimate of Kaplan and Meier (1958): it is not distorted by drafts that the policy itself ended
early. A class with few drafts borrows from those of the same source and length, and these begin
with the assumption that everything is accepted, so that an engine starts like policy `fixed` and
learns within some thousand drafts.
"""

import numpy as np
from numba import njit, types

from sam_rollout.automaton.compilation import WarmUp, compile_kernels
from sam_rollout.automaton.interface import (
    MATCH_BRANCHES,
    MATCH_CONFIRMED,
    MATCH_DISTANCE,
    MATCH_LENGTH,
    Int32Array,
)
from sam_rollout.config import SamConfig
from sam_rollout.drafting.in_flight import NO_SOURCE
from sam_rollout.sources import Source
from sam_rollout.verified import CHANCES, Offered, Verified

# Lowest values of the classes but the first one.
_LENGTHS = (2, 3, 4, 6, 8, 12, 16, 32)
_BRANCHES = (1, 2, 3, 5, 9)  # 0 where a source does not tell
COUNTED_BRANCHES = _BRANCHES[-1]
_DISTANCES = (64, 256, 1024, 4096)
_ACCEPTED = (1, 2)
_CLASSES_PER_LENGTH = 2 * (len(_BRANCHES) + 1) * (len(_DISTANCES) + 1) * (len(_ACCEPTED) + 1)
_CLASSES = (len(_LENGTHS) + 1) * _CLASSES_PER_LENGTH  # of one source

# Drafts that an estimate borrows from the wider one: of its source and length, and above these the
# assumption that everything is accepted.
_BORROWED = 8.0
_ASSUMED = 4.0
# Counts are halved when they reach this, so that a policy in training is followed.
_CLASS_MEMORY = 1 << 12
_LENGTH_MEMORY = 1 << 16


class DraftPolicy:
    """Chooses sources and lengths, and learns from drafts that were verified.

    Args:
        config: validated.
        sources: in order of precedence.
        max_rows: most requests in one batch.
    """

    def __init__(self, config: SamConfig, sources: list[Source], max_rows: int) -> None:
        warm_up()
        count, positions = len(sources), config.max_draft_tokens
        self._least = config.min_confidence if config.draft_policy == "confidence" else 0.0
        self._tells = self._least > 0 or config.gate.kind == "auto"  # chances by position
        self._chances = np.zeros((max_rows, positions), np.float32)
        self._offered = np.zeros(max_rows, np.int32)
        self._worth = np.zeros(max_rows, np.int32)  # of what is offered, that to hand over
        self._tokens = np.zeros((4, len(CHANCES)))  # see `Offered`
        competes = np.array([source.competes for source in sources], np.int32)
        self._competes = competes if competes.sum() > 1 else 0 * competes  # one alone need not
        self._biases = np.array([source.bias for source in sources], np.int32)
        # [class, position]: drafts that got to a position, and those whose token there was accepted
        self._by_class = np.zeros((2, count * _CLASSES, positions), np.int32)
        lengths = count * (len(_LENGTHS) + 1)
        self._by_length = np.zeros((2, lengths, positions), np.int32)
        self._class = np.zeros(max_rows, np.int32)  # of the drafts in flight
        self._accepted = np.zeros(max_rows, np.int32)  # of the request's draft before
        self._k = np.zeros((count, max_rows), np.int32)

    def rearrange(self, rows: np.ndarray) -> None:
        """Follow a changed batch: `rows`, int[B], is each row's former place, -1 for none."""
        known = rows >= 0
        for column in (self._class, self._accepted):
            column[: len(rows)] = np.where(known, column[rows], 0)

    def learn(self, verified: Verified) -> None:
        """Learn what was right of the last drafts."""
        _learn(
            verified.judged, verified.right, verified.source, self._class, self._accepted,
            self._by_class, self._by_length,
        )  # fmt: skip

    def plan(
        self,
        matches: Int32Array,
        budget: Int32Array,
        out_source: Int32Array,
        least_chance: float = 0.0,
    ) -> tuple[Int32Array, list[bool]]:
        """Choose for each row a source and how many tokens to draft from it.

        Args:
            matches: int32[sources, max_rows, MATCH_WIDTH].
            budget: int32[B], most tokens to draft.
            out_source: int32[max_rows], the source of every row, NO_SOURCE for none.
            least_chance: of a token that is worth its time.

        Returns:
            k, int32[sources, B], tokens to draw, above 0 for at most one source per row; and
            whether a source was chosen at all.
        """
        chosen = _plan(
            matches, self._competes, self._biases, budget, out_source, self._class,
            self._accepted, self._by_class, self._by_length, self._k,
        )  # fmt: skip
        if self._tells:
            _end_drafts(
                self._class, self._by_class, self._by_length, out_source, budget, self._least,
                max(self._least, least_chance), self._k, self._chances, self._offered, self._worth,
            )  # fmt: skip
        return self._k[:, : len(budget)], [bool(chosen >> s & 1) for s in range(len(self._biases))]

    def hold_back(self, counts: Int32Array, out_held_back: Int32Array) -> None:
        """Take from `counts`, int32[B] tokens drawn, those that are not to be handed over."""
        if self._tells:
            np.subtract(counts, self._worth[: len(counts)], out=out_held_back)
            np.maximum(out_held_back, 0, out=out_held_back)
            counts -= out_held_back

    def offered(self, verified: Verified) -> Offered | None:
        """What the last plan could have drafted, rows as they were then; None if nobody asks."""
        if not self._tells:
            return None
        rows = _sum_up(
            verified.sampled, verified.judged, verified.right, self._chances, self._offered,
            self._tokens,
        )  # fmt: skip
        return Offered(rows, self._tokens)


@njit(nogil=True)
def _class_in(value, lowest):
    number = 0
    for bound in lowest:
        if value < bound:
            break
        number += 1
    return number


@njit(nogil=True)
def _class_of(source, match, accepted):
    """Number of a draft's class."""
    number = source * (len(_LENGTHS) + 1) + _class_in(match[MATCH_LENGTH], _LENGTHS)
    number = number * (len(_BRANCHES) + 1) + _class_in(match[MATCH_BRANCHES], _BRANCHES)
    number = 2 * number + match[MATCH_CONFIRMED]
    number = number * (len(_DISTANCES) + 1) + _class_in(match[MATCH_DISTANCE], _DISTANCES)
    return number * (len(_ACCEPTED) + 1) + _class_in(accepted, _ACCEPTED)


@njit(nogil=True)
def _count(table, number, accepted, drafted, memory):
    """Enter a draft; `table` is int32[2, classes, positions]."""
    for position in range(min(accepted + 1, drafted)):
        table[0, number, position] += 1
        if position < accepted:
            table[1, number, position] += 1
    if table[0, number, 0] >= memory:
        for position in range(table.shape[2]):
            table[0, number, position] //= 2
            table[1, number, position] //= 2


@njit(nogil=True)
def _share(by_class, by_length, number, position):
    """Of a class's drafts that got to a position, the share whose token there was accepted."""
    wider = number // _CLASSES_PER_LENGTH
    share = (by_length[1, wider, position] + _ASSUMED) / (by_length[0, wider, position] + _ASSUMED)
    return (by_class[1, number, position] + _BORROWED * share) / (
        by_class[0, number, position] + _BORROWED
    )


@njit(nogil=True)
def _end_drafts(
    number, by_class, by_length, source, budget, least_offered, least, k, chances, offered, worth
):
    """Shorten the drafts of a plan to the tokens that are `worth` it and one to hold back.

    Fills `chances` and `offered`, too: the tokens of a chance of at least `least_offered`.
    """
    for i in range(budget.size):
        offered[i] = worth[i] = 0
        if source[i] == NO_SOURCE:
            if budget[i] < 1:
                offered[i] = -1  # not asked for any
            continue
        chance = 1.0
        for position in range(budget[i]):
            chance *= _share(by_class, by_length, number[i], position)
            chances[i, position] = chance
            if chance >= least_offered:
                offered[i] = position + 1
            if chance >= least:
                worth[i] = position + 1
        k[source[i], i] = min(worth[i] + 1, budget[i])


@njit(nogil=True)
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


@njit(nogil=True)
def _expected(by_class, by_length, number, budget):
    """How many tokens of a draft of a class will be accepted."""
    chance, accepted = 1.0, 0.0
    for position in range(budget):
        chance *= _share(by_class, by_length, number, position)
        accepted += chance
    return accepted


@njit(nogil=True)
def _learn(drafted, accepted, source, number, accepted_before, by_class, by_length):
    for i in range(source.size):
        if source[i] == NO_SOURCE:
            continue
        _count(by_class, number[i], accepted[i], drafted[i], _CLASS_MEMORY)
        wider = number[i] // _CLASSES_PER_LENGTH
        _count(by_length, wider, accepted[i], drafted[i], _LENGTH_MEMORY)
        accepted_before[i] = accepted[i]


@njit(nogil=True)
def _plan(matches, competes, biases, budget, source, number, accepted, by_class, by_length, out_k):
    """Fill `out_k` and `source`; return which sources were chosen, source s as bit s."""
    chosen = 0
    for i in range(budget.size):
        best, longest, most = NO_SOURCE, 0, 0.0
        for s in range(biases.size):
            out_k[s, i] = 0
            match_length = matches[s, i, MATCH_LENGTH]
            if match_length == 0:
                continue
            # The first source is compared with none.
            if s > 0 and not competes[s] and match_length <= longest + biases[s]:
                continue
            if competes[s] and budget[i] > 0:
                class_ = _class_of(s, matches[s, i], accepted[i])
                expected = _expected(by_class, by_length, class_, budget[i])
                # While nothing is known of them, the longer match.
                if expected > most or (expected == most and match_length > longest):
                    best, most = s, expected
            else:
                best = s
            longest = max(longest, match_length)
        source[i] = NO_SOURCE
        if best == NO_SOURCE or budget[i] < 1:
            accepted[i] = 0
            continue
        chosen |= 1 << best
        source[i] = best
        number[i] = _class_of(best, matches[best, i], accepted[i])
        out_k[best, i] = budget[i]
    return chosen


_INT32 = types.Array(types.int32, 1, "C")
_INPUT = types.Array(types.int32, 1, "A", readonly=True)
_TABLE = types.Array(types.int32, 3, "C")
_CHANCES = types.Array(types.float32, 2, "C")
_SIGNATURES = (
    (_learn, (*[_INT32] * 5, _TABLE, _TABLE)),
    (
        _plan,
        (
            _TABLE, _INT32, _INT32, _INT32, _INT32, _INT32, _INT32, _TABLE, _TABLE,
            types.Array(types.int32, 2, "C"),
        ),
    ),
    (
        _end_drafts,
        (
            _INT32, _TABLE, _TABLE, _INT32, _INT32, types.float64, types.float64,
            types.Array(types.int32, 2, "C"), _CHANCES, _INT32, _INT32,
        ),
    ),
    (_sum_up, (_INPUT, _INT32, _INT32, _CHANCES, _INT32, types.Array(types.float64, 2, "C"))),
)  # fmt: skip


def warm_up() -> WarmUp:
    """Compile what this module runs in every step, as `automaton.kernels.warm_up` does."""
    return compile_kernels(_SIGNATURES)
