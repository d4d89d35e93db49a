"""The source `recycling`: after each token the one that the model itself held likeliest last.

Token Recycling (Luo et al. 2024, arXiv 2408.08696) as a chain: the target model scores every
position of a step anyway, drafts that it rejects included, and its likeliest next token is kept by
the token before. It costs no text and no model of its own, and knows something where no source
finds a suffix. What it knows came from the logits, so it is told by whoever sees them (`hear`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from sam_rollout.automaton.interface import (
    FOLLOWER,
    FOLLOWERS,
    NOWHERE,
    PLACE_HEADER,
    PLACE_KIND,
    PLACE_LENGTH,
    PLACE_STATE,
    Int32Array,
    Int64Array,
)
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.core.limits import UNKNOWN_VOCABULARY, Limits
from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.contract import Scored, Source, SourceEntry, Usage


@dataclass(frozen=True)
class RecyclingSourceConfig(Section):
    """Settings of the drafts from what the model held likeliest (arXiv 2408.08696)."""

    PATH: ClassVar[str] = "sam.sources.recycling"

    enabled: bool = setting(
        False,
        meaning="Draft what the model itself held likeliest after a token when it last scored it. "
        "Costs 8 bytes per token of the vocabulary, and finding the likeliest token of each scored "
        "position.",
    )


class TokenRecycling(Source):
    """One table for all requests of an engine.

    Args:
        config: has nothing but whether it is on.
        limits: of the engine; the vocabulary's size has to be known.
    """

    name = "recycling"

    def __init__(self, config: RecyclingSourceConfig, limits: Limits) -> None:
        from sam_rollout.automaton.compilation import warm_up  # compiles
        from sam_rollout.automaton.followers import hear

        warm_up(hear)
        self._hear = hear
        # By token: the likeliest next one, and how many times in a row it was that.
        self._followers = np.zeros((limits.vocab_size, 2), np.int32)
        self._followers[:, FOLLOWER] = -1
        self._heard = 0

    def hear(self, scored: Scored) -> None:
        """As `Source.hear`; what fills a step up tells nothing."""
        if scored.likeliest is not None:
            self._hear(scored.tokens, scored.likeliest, scored.widths, self._followers)
            self._heard += len(scored.tokens)

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Nothing: all requests share the table."""

    def locate(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_places: Int64Array,
    ) -> None:
        """Every row stands at its last token."""
        rows = len(num_tokens)
        out_places[:rows, PLACE_KIND] = np.where(eligible, FOLLOWERS, NOWHERE)
        out_places[:rows, PLACE_HEADER] = self._followers.ctypes.data
        out_places[:rows, PLACE_STATE] = token_ids[np.arange(rows), num_tokens - 1]
        out_places[:rows, PLACE_LENGTH] = len(self._followers)

    def counters(self) -> Mapping[str, int]:
        """Positions heard."""
        return {"recycling_positions": self._heard}

    def usage(self) -> Usage:
        """The table."""
        return Usage(bytes=self._followers.nbytes)


def _make(
    config: RecyclingSourceConfig, limits: Limits, _responses: object
) -> TokenRecycling | None:
    return None if limits.vocab_size == UNKNOWN_VOCABULARY else TokenRecycling(config, limits)


SOURCE = SourceEntry(
    "recycling",
    RecyclingSourceConfig,
    _make,
    order=40,
)
