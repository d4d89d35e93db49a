"""Keeps the drafts in flight, which the engine received, and finds their accepted tokens.

The number of accepted draft tokens follows from the text alone: it is the length of the draft's
longest prefix with which the text continues. Tokens that are held back are chosen like draft
tokens, but the engine does not receive them. The token that the model samples after the draft shows
whether the first held-back token is right.
"""

import numpy as np
from numba import njit

from sam_rollout.automaton.compilation import GIVEN_INT32, GIVEN_INT32_2D, INT32_2D, kernel, warm_up
from sam_rollout.automaton.interface import Int32Array
from sam_rollout.core.limits import Limits
from sam_rollout.core.verified import Verified

NO_SOURCE = -1
COUNTS, HELD_BACK, FILLING, SOURCE, LENGTH = range(5)
_SOURCE = Verified._fields.index("source") - 1  # index of this field in the output of `_verify`


class DraftBatch:
    """The drafts of one engine step; the next step reuses their memory.

    Row i holds `counts[i]` draft tokens, then `held_back[i]` tokens that were held back. If the
    step needs padding, the first `filling[i]` entries after the draft are verified, too. The source
    whose votes for the first token weighed most has the number `source[i]` (NO_SOURCE without
    votes). `length[i]` is the text's length when the draft was made.
    """

    def __init__(self, limits: Limits) -> None:
        warm_up(_verify)
        max_rows = limits.max_rows
        self.tokens = np.zeros((max_rows, limits.k), np.int32)
        # A token's parent is the token that it follows. `parents` has the parent's index in the
        # row, or -1 if the parent is the text's last token. Parents come before their children.
        self.parents = np.empty((max_rows, limits.k), np.int32)
        self.has_trees = True  # whether rows may hold trees; if not, all drafts are chains
        self.make_chains()
        # The five columns share one array, because each argument of compiled code costs time.
        self.columns = np.zeros((5, max_rows), np.int32)
        self.counts, self.held_back, self.filling, self.source, self.length = self.columns
        self.source.fill(NO_SOURCE)
        self.rows = 0  # requests in the batch
        self.pending = False  # whether there are draft or padding tokens to verify
        self._verified = np.zeros((6, max_rows), np.int32)

    def make_chains(self) -> None:
        """Make every row a chain, in which each token follows the one before it."""
        if self.has_trees:
            self.parents[:] = np.arange(-1, self.parents.shape[1] - 1)
            self.has_trees = False

    def rearrange(self, rows: np.ndarray) -> None:
        """Reorder rows after the batch changed.

        `rows`, int[B], holds each row's old number, or -1 if the row is new.
        """
        if self.pending:
            known = rows >= 0
            self.tokens[: len(rows)] = self.tokens[rows]
            self.parents[: len(rows)] = self.parents[rows]
            self.length[: len(rows)] = self.length[rows]
            for column, empty in (
                (self.counts, 0), (self.held_back, 0), (self.filling, 0), (self.source, NO_SOURCE),
            ):  # fmt: skip
                column[: len(rows)] = np.where(known, column[rows], empty)

    def verify(
        self, token_ids: Int32Array, num_tokens: Int32Array, sampled: Int32Array
    ) -> Verified:
        """Find the accepted tokens; the arguments are those of `SamDrafter.observe`."""
        found = self._verified
        if self.pending:
            _verify(token_ids, num_tokens, sampled, self.tokens, self.parents, self.columns, found)
        else:
            found.fill(0)
            found[_SOURCE].fill(NO_SOURCE)
        return Verified(sampled, *found[:, : len(num_tokens)])

    def clear(self, rows: int) -> None:
        """Remove the last step's drafts; `rows` is the number of requests in the next batch."""
        self.rows = rows
        if self.pending:
            self.columns[:3].fill(0)
            self.source.fill(NO_SOURCE)
            self.pending = False

    def to_lists(self) -> list[list[int]]:
        """Return the tokens that a step verifies, padding included, as lists for vLLM."""
        if not self.pending:
            return [[]] * self.rows
        lengths = self.counts[: self.rows] + self.filling[: self.rows]
        lists = self.tokens[: self.rows].tolist()
        if (lengths < self.tokens.shape[1]).any():
            lists = [row[:count] for row, count in zip(lists, lengths.tolist(), strict=True)]
        return lists


@njit(nogil=True)
def next_node(tokens, parents, count, node, token):
    """Return the child of a node for the next token; 0 if there is no such child.

    Node 0 is the text's last token, and node n is `tokens[n - 1]`. The row holds `count` tokens.
    """
    for child in range(node, count):
        if parents[child] == node - 1 and tokens[child] == token:
            return child + 1
    return 0


@kernel(GIVEN_INT32_2D, GIVEN_INT32, GIVEN_INT32, *[INT32_2D] * 4)
def _verify(token_ids, num_tokens, sampled, tokens, parents, columns, out):
    counts, held_back, filling, source, length = columns
    out_drafted, out_accepted, out_filling, out_source, out_judged, out_right = out
    for i in range(num_tokens.size):
        out[:, i] = 0
        out_source[i] = NO_SOURCE
        gained, start, end = sampled[i], length[i], num_tokens[i]
        # If the lengths disagree, the engine has run a step without these drafts.
        known = counts[i] + held_back[i]
        if gained < 1 or known + filling[i] == 0 or end - start != gained:
            continue
        if i >= token_ids.shape[0] or end > token_ids.shape[1]:
            continue
        drafted = counts[i]
        # The last gained token is the bonus token. It is never an accepted draft token, but may
        # show that a chosen token is right although the engine did not verify it.
        right = accepted = node = 0
        while right < gained:
            child = next_node(tokens[i], parents[i], known, node, token_ids[i, start + right])
            if child == 0:
                break
            accepted += child <= drafted
            node = child
            right += 1
        if right == gained and node <= drafted:
            drafted = node - 1  # the bonus token equals this draft token, which was not verified
        out_drafted[i] = drafted
        out_accepted[i] = min(accepted, gained - 1)
        out_filling[i] = filling[i]
        # After a wrong token, all later ones count as wrong, so all chosen tokens are judged.
        out_judged[i] = right if right == gained else known
        out_right[i] = right
        if known > 0:  # otherwise no source voted
            out_source[i] = source[i]
