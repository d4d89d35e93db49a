"""The source `recycling`: drafts the next token that the model last found likeliest.

This is Token Recycling (Luo et al. 2024, arXiv 2408.08696) with chains instead of trees. For each
token, a table keeps the next token that was likeliest when the model last scored the token.
Rejected draft tokens are also scored.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sam_rollout.automaton import interface
from sam_rollout.automaton.interface import BoolArray, Int32Array, Int64Array
from sam_rollout.core.limits import UNKNOWN_VOCABULARY, Limits
from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.contract import Scored, Source, SourceEntry, Usage


@dataclass(frozen=True)
class RecyclingSourceConfig(Section):
    """Settings of the drafts from the model's likeliest tokens (arXiv 2408.08696)."""

    PATH: ClassVar[str] = "sam.sources.recycling"

    enabled: bool = setting(
        False,
        meaning="Draft, after each token, the next token that the model found likeliest when it "
        "last scored this token. The device must find the likeliest token of each scored position.",
    )


class TokenRecycling(Source):
    """Keeps one table for all requests of an engine; the vocabulary's size has to be known."""

    def __init__(self, limits: Limits) -> None:
        from sam_rollout.automaton.compilation import warm_up  # this import is slow
        from sam_rollout.automaton.scored import note_likeliest

        warm_up(note_likeliest)
        self._note = note_likeliest
        self._followers = np.zeros((limits.vocab_size, 2), np.int32)
        self._followers[:, interface.FOLLOWER] = -1

    def hear(self, scored: Scored) -> None:
        """Record the likeliest token after each scored position; padding is skipped."""
        if scored.likeliest is not None:
            self._note(scored.tokens, scored.likeliest, scored.widths, self._followers)

    def locate(
        self, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray, places: Int64Array
    ) -> None:
        """Point every row to the table's entry for the row's last token."""
        rows, table = len(num_tokens), self._followers
        last = token_ids[np.arange(rows), num_tokens - 1]
        kind = np.where(eligible, interface.FOLLOWERS, interface.NOWHERE)
        interface.write_places(places[:rows], kind, table.ctypes.data, last, len(table))

    def usage(self) -> Usage:
        """Report the bytes of the table."""
        return Usage(bytes=self._followers.nbytes)


def _make(
    _config: RecyclingSourceConfig, limits: Limits, _responses: object
) -> TokenRecycling | None:
    return None if limits.vocab_size == UNKNOWN_VOCABULARY else TokenRecycling(limits)


SOURCE = SourceEntry("recycling", RecyclingSourceConfig, _make, order=40)
