"""Which source a row drafts from, how many tokens, and what became of them.

Choice: of own text and siblings, the source of whose draft more tokens are expected to be accepted,
by the chances described below; while nothing is known of either, the longer match. Another source
needs a match that is longer than all before it, by more than its bias. A tie goes to the source
named first.

Length, policy `confidence`: a draft goes on while its next token's chance to be accepted is at
least `sam.min_confidence`. Nothing about a text or a model is built in: chances come from the
drafts that this engine verified so far. Drafts are classed by what is known when they are made:
their source, the length of the match, how many tokens have followed it, whether the one drafted was
confirmed, how far back it lies, and how much of the request's previous draft was accepted. For each
class and position two numbers are kept: how often a draft got there, and how often the token there
was accepted. The chance of a position is the product of these shares up to there, the product-limit
estimate of Kaplan and Meier (1958): it is not distorted by drafts that the policy itself ended
early. A class with few drafts borrows from those of the same source and length, and these begin
with the assumption that everything is accepted, so that an engine starts like policy `fixed` and
learns within some thousand drafts.
"""

import numpy as np
from numba import njit, types

from sam_rollout.automaton.compilation import WarmUp, compile_kernels
from sam_rollout.automaton.kernels import (
    MATCH_BRANCHES,
    MATCH_CONFIRMED,
    MATCH_DISTANCE,
    MATCH_LENGTH,
)
from sam_rollout.automaton.pool import Int32Array
from sam_rollout.config import SamConfig

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

_NO_SOURCE = -1

# Columns of `totals`.
DRAFTED = 0
ACCEPTED = 1


class DraftPolicy:
    """Chooses sources and lengths, and follows drafts until they are verified.

    Args:
        config: validated.
        biases: of the sources in order of precedence; those of live ones mean nothing.
        max_rows: most requests in one batch.
        live: how many sources, the first ones, are live texts.

    Attributes:
        totals: int64[sources, 2], tokens of verified drafts and how many of them were accepted. A
            token that the engine drew itself where it had cut a draft short counts as neither.
    """

    def __init__(self, config: SamConfig, biases: list[int], max_rows: int, live: int = 1) -> None:
        warm_up()
        sources, positions = len(biases), config.max_draft_tokens
        self._least = config.min_confidence if config.draft_policy == "confidence" else 0.0
        self._live = live
        self._biases = np.array(biases, np.int32)
        self.totals = np.zeros((sources, 2), np.int64)
        # [class, position]: drafts that got to a position, and those whose token there was accepted
        self._by_class = np.zeros((2, sources * _CLASSES, positions), np.int32)
        lengths = sources * (len(_LENGTHS) + 1)
        self._by_length = np.zeros((2, lengths, positions), np.int32)
        # Of the drafts in flight, [max_rows].
        self._source = np.full(max_rows, _NO_SOURCE, np.int32)
        self._class = np.zeros(max_rows, np.int32)
        self._length = np.zeros(max_rows, np.int32)  # of the text when the draft was made
        self._accepted = np.zeros(max_rows, np.int32)  # of the request's draft before
        self._k = np.zeros((sources, max_rows), np.int32)

    def rearrange(self, rows: np.ndarray) -> None:
        """Follow a changed batch: `rows`, int[B], is each row's former place, -1 for none."""
        known = rows >= 0
        for column, empty in (
            (self._source, _NO_SOURCE), (self._class, 0), (self._length, 0), (self._accepted, 0)
        ):  # fmt: skip
            moved = np.where(known, column[rows], empty)
            column.fill(empty)
            column[: len(rows)] = moved

    def observe(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        tokens: Int32Array,
        counts: Int32Array,
    ) -> None:
        """Learn what was accepted of the last drafts.

        Args:
            token_ids, num_tokens, eligible: the texts as they are now, see `SamDrafter.step`.
            tokens, counts: int32[B, k], int32[B], those drafts, in today's order of rows.
        """
        _observe(
            token_ids, num_tokens, eligible, tokens, counts, self._source, self._class,
            self._length, self._accepted, self.totals, self._by_class, self._by_length,
        )  # fmt: skip

    def plan(
        self, matches: Int32Array, num_tokens: Int32Array, budget: Int32Array
    ) -> tuple[Int32Array, list[bool]]:
        """Choose for each row a source and how many tokens to draft from it.

        Args:
            matches: int32[sources, max_rows, MATCH_WIDTH].
            num_tokens: int32[B], length of the texts.
            budget: int32[B], most tokens to draft.

        Returns:
            k, int32[sources, B], above 0 for at most one source per row; and whether a source was
            chosen at all.
        """
        rows = len(budget)
        chosen = _plan(
            matches, num_tokens, self._live, self._biases, budget, self._least, self._source,
            self._class, self._length, self._accepted, self._by_class, self._by_length, self._k,
        )  # fmt: skip
        return self._k[:, :rows], [bool(chosen >> s & 1) for s in range(len(self._biases))]


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
def _confident(by_class, by_length, number, budget, least):
    """Tokens to draft in a class: one at least, so that its estimate lives on."""
    chance = 1.0
    for position in range(budget):
        chance *= _share(by_class, by_length, number, position)
        if chance < least:
            return max(position, 1)
    return budget


@njit(nogil=True)
def _expected(by_class, by_length, number, budget):
    """How many tokens of a draft of a class will be accepted."""
    chance, accepted = 1.0, 0.0
    for position in range(budget):
        chance *= _share(by_class, by_length, number, position)
        accepted += chance
    return accepted


@njit(nogil=True)
def _observe(
    token_ids, num_tokens, eligible, tokens, counts, source, number, length, accepted, totals,
    by_class, by_length,
):  # fmt: skip
    for i in range(num_tokens.size):
        drafted, start, end = counts[i], length[i], num_tokens[i]
        if source[i] < 0 or not eligible[i] or end <= start:
            continue
        if i >= token_ids.shape[0] or end > token_ids.shape[1]:
            continue
        # The last new token is the engine's own, whether it equals a drafted one or not.
        most = min(drafted, end - start - 1)
        same = 0
        while same < most and token_ids[i, start + same] == tokens[i, same]:
            same += 1
        if same == most and same < drafted and token_ids[i, start + same] == tokens[i, same]:
            drafted = same  # the engine verified no more of it
        totals[source[i], DRAFTED] += drafted
        totals[source[i], ACCEPTED] += same
        _count(by_class, number[i], same, drafted, _CLASS_MEMORY)
        wider = number[i] // _CLASSES_PER_LENGTH
        _count(by_length, wider, same, drafted, _LENGTH_MEMORY)
        accepted[i] = same
        source[i] = _NO_SOURCE


@njit(nogil=True)
def _plan(
    matches, num_tokens, live, biases, budget, least, source, number, length, accepted, by_class,
    by_length, out_k,
):  # fmt: skip
    """Fill `out_k`; return which sources were chosen, source s as bit s."""
    chosen = 0
    for i in range(budget.size):
        best, longest, most = _NO_SOURCE, 0, 0.0
        for s in range(biases.size):
            out_k[s, i] = 0
            match_length = matches[s, i, MATCH_LENGTH]
            if match_length == 0:
                continue
            # The first one has nobody to be longer than.
            if s > 0 and s >= live and match_length <= longest + biases[s]:
                continue
            if s < live and live > 1 and budget[i] > 0:
                class_ = _class_of(s, matches[s, i], accepted[i])
                expected = _expected(by_class, by_length, class_, budget[i])
                # While nothing is known of them, the longer match.
                if expected > most or (expected == most and match_length > longest):
                    best, most = s, expected
            else:
                best = s
            longest = max(longest, match_length)
        source[i] = _NO_SOURCE
        if best == _NO_SOURCE or budget[i] < 1:
            accepted[i] = 0
            continue
        chosen |= 1 << best
        source[i] = best
        number[i] = _class_of(best, matches[best, i], accepted[i])
        length[i] = num_tokens[i]
        out_k[best, i] = budget[i]
        if least > 0:
            out_k[best, i] = _confident(by_class, by_length, number[i], budget[i], least)
    return chosen


_INT32 = types.Array(types.int32, 1, "C")
_INPUT = types.Array(types.int32, 1, "A", readonly=True)
_TABLE = types.Array(types.int32, 3, "C")
_SIGNATURES = (
    (
        _observe,
        (
            types.Array(types.int32, 2, "A", readonly=True), _INPUT,
            types.Array(types.boolean, 1, "A", readonly=True), types.Array(types.int32, 2, "C"),
            _INT32, _INT32, _INT32, _INT32, _INT32, types.Array(types.int64, 2, "C"), _TABLE,
            _TABLE,
        ),
    ),
    (
        _plan,
        (
            _TABLE, _INPUT, types.int64, _INT32, _INT32, types.float64, _INT32, _INT32, _INT32,
            _INT32, _TABLE, _TABLE, types.Array(types.int32, 2, "C"),
        ),
    ),
)  # fmt: skip


def warm_up() -> WarmUp:
    """Compile what this module runs in every step, as `automaton.kernels.warm_up` does."""
    return compile_kernels(_SIGNATURES)
