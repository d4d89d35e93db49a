"""What the sources over text that no live request writes have in common: history and corpus."""

from __future__ import annotations

import numpy as np

from sam_rollout.automaton.interface import MATCH_LENGTH, Int32Array
from sam_rollout.sources.contract import Limits, Source


class StaticTexts(Source):
    """A cursor per row, in the static automaton that the row is attached to or in none."""

    def __init__(self, limits: Limits) -> None:
        from sam_rollout.automaton.static_match import StaticMatcher  # compiles

        self._matcher = StaticMatcher(limits.max_rows)
        self._lengths = np.zeros(limits.max_rows, np.int32)

    def match(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_matches: Int32Array,
    ) -> None:
        """Catch up, then find each row's match; only its length is known."""
        self.catch_up(token_ids, num_tokens, eligible)
        lengths = self._lengths[: len(num_tokens)]
        self._matcher.match(token_ids, num_tokens, eligible, lengths)
        out_matches[:, MATCH_LENGTH] = lengths

    def draft(
        self, matches: Int32Array, k: Int32Array, out_tokens: Int32Array, out_counts: Int32Array
    ) -> None:
        """Draft from the matches found last, which the cursors remember."""
        self._matcher.draft(k, out_tokens, out_counts)
