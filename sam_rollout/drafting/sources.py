"""What the drafter asks of a source over text that no live request writes (history, corpus)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from sam_rollout.automaton.pool import Int32Array
from sam_rollout.identity import RequestIdentity


class StaticSource(Protocol):
    """Text that requests match against but do not extend.

    The drafter calls, in every step: `bind`; then, gate open, `match` and `draft` or, gate closed,
    `catch_up`. Rows keep their meaning from one `bind` to the next. A source that cannot serve a
    row reports a match of length 0; it never raises for the content of a row.

    Attributes:
        name: as under `sam.sources`; names the source's counters.
        bias: tokens by which the match has to be longer than the best match of the sources before
            it, to be drafted from: strictly longer at 0.
    """

    name: str
    bias: int

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Tell which request is in which row; called only when the batch has changed.

        Args:
            request_ids: B ids in row order, without repetition.
            identities: who they are, in the same order; None where nobody said.
        """
        ...

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Read what is new in each row, without drafting. A source may leave that to `match`.

        Args:
            token_ids: int32[R >= B, L], row i begins with the text of request i; read in place.
            num_tokens: int32[B], known tokens of each row; they may grow by any number.
            eligible: bool[B]; rows where it is False are left alone.
        """
        ...

    def match(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_lengths: Int32Array,
    ) -> None:
        """Read what is new, then find each row's longest suffix that the source can continue.

        Args:
            token_ids, num_tokens, eligible: as for `catch_up`.
            out_lengths: int32[B], length of the match in tokens, 0 for none; every entry is
                written, those of rows that are not eligible with 0.
        """
        ...

    def draft(self, k: Int32Array, out_tokens: Int32Array, out_counts: Int32Array) -> None:
        """Copy what followed the matches found last.

        Args:
            k: int32[B], most tokens to draft; 0 for rows that draft from another source, whose
                outputs have to be left as they are.
            out_tokens: int32[B, K].
            out_counts: int32[B], tokens drafted.
        """
        ...

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended; unknown ids are passed over."""
        ...

    def end_step(self) -> None:
        """A training step is over."""
        ...

    def counters(self) -> Mapping[str, int]:
        """Own counters of the source, besides drafted and accepted tokens; ends up in telemetry."""
        ...
