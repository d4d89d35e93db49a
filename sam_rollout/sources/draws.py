"""The source `draws`: drafts tokens that were drawn at positions after a rejected draft token.

A coupled sampler draws the token of every position with the position's own random number. A verify
step also draws tokens for the positions after a draft's first wrong token. Later, the final token
of such a position is drawn with the same random number, and often equals the token drawn before.
Jacobi and Lookahead decoding (Fu et al. 2024, arXiv 2402.02057) reuse such tokens if decoding is
greedy.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sam_rollout.automaton import interface
from sam_rollout.automaton.interface import BoolArray, Int32Array, Int64Array
from sam_rollout.core.limits import Limits
from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.contract import Identities, Scored, Source, SourceEntry, Usage


@dataclass(frozen=True)
class DrawsSourceConfig(Section):
    """Settings of the source `draws` (compare arXiv 2402.02057)."""

    PATH: ClassVar[str] = "sam.sources.draws"

    enabled: bool = setting(
        True,
        meaning="Draft the tokens that were sampled at positions after a rejected draft token "
        "([why](#draws-of-rejected-positions)). Without a coupled sampler the source drafts "
        "nothing.",
    )


class PositionDraws(Source):
    """Keeps a table of draws by position for each row; a preempted request loses its table."""

    def __init__(self, limits: Limits) -> None:
        from sam_rollout.automaton.compilation import warm_up  # this import is slow
        from sam_rollout.automaton.scored import note_draws

        warm_up(note_draws)
        self._note = note_draws
        # A draft has at most k tokens, so no position farther ahead was scored.
        shape = limits.max_rows, limits.k + 1, interface.DRAWN_WIDTH
        self._table = np.full(shape, -1, np.int32)
        self._headers = self._table.ctypes.data + self._table[0].nbytes * np.arange(limits.max_rows)
        self._bound: list[str] = []
        self._row_of: dict[str, int] = {}
        self._heard = 0

    def bind(self, request_ids: Sequence[str], identities: Identities) -> None:
        """Move each request's table to its new row."""
        before = self._row_of
        rows = np.array([before.get(request_id, -1) for request_id in request_ids], np.int64)
        table = self._table[rows]
        table[rows < 0] = -1
        self._table[: len(rows)] = table
        self._bound = list(request_ids)
        self._row_of = {request_id: row for row, request_id in enumerate(self._bound)}

    def hear(self, scored: Scored) -> None:
        """Record the tokens that were drawn at the scored positions."""
        if scored.drawn is None:
            return
        rows = np.arange(len(scored.request_ids))
        if scored.request_ids != self._bound:
            known = [self._row_of.get(request_id, -1) for request_id in scored.request_ids]
            rows = np.array(known, np.int64)
        self._note(
            scored.tokens, scored.positions, scored.parents, scored.drawn, scored.widths, rows,
            self._table,
        )  # fmt: skip
        self._heard += len(scored.drawn)

    def locate(
        self, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray, places: Int64Array
    ) -> None:
        """Point every row to its table, at the position of the row's next token."""
        rows, length = len(num_tokens), self._table.shape[1]
        each = np.arange(rows)
        next_draw = self._table[each, num_tokens % length]
        follows = (next_draw[:, interface.DRAWN_POSITION] == num_tokens) & (
            next_draw[:, interface.DRAWN_AFTER] == token_ids[each, num_tokens - 1]
        )
        kind = np.where(eligible, interface.DRAWN, interface.NOWHERE)
        state = 2 * num_tokens.astype(np.int64) + follows
        interface.write_places(places[:rows], kind, self._headers[:rows], state, length)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests that ended, because a new request may have the same id."""
        for request_id in request_ids:
            row = self._row_of.pop(request_id, -1)
            if row >= 0:
                self._table[row] = -1

    def counters(self) -> Mapping[str, int]:
        """Return the number of scored positions that `hear` has received."""
        return {"draws_positions": self._heard}

    def usage(self) -> Usage:
        """Report the bytes of the tables of requests in the batch."""
        return Usage(bytes=len(self._row_of) * self._table[0].nbytes)


SOURCE = SourceEntry(
    "draws", DrawsSourceConfig, lambda _config, limits, _responses: PositionDraws(limits), order=45
)
