"""What the sources over text that no live request writes have in common: history and corpus."""

from __future__ import annotations

import numpy as np

from sam_rollout.automaton.interface import Int32Array, Int64Array
from sam_rollout.sources.contract import Limits, Source


class StaticTexts(Source):
    """A cursor per row, in the static automaton that the row is attached to or in none."""

    def __init__(self, limits: Limits) -> None:
        from sam_rollout.automaton.static_match import StaticMatcher  # compiles

        self._matcher = StaticMatcher(limits.max_rows)

    def locate(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_places: Int64Array,
    ) -> None:
        """Catch up, then tell where each row stands."""
        self.catch_up(token_ids, num_tokens, eligible)
        self._matcher.place(token_ids, num_tokens, eligible, out_places)
