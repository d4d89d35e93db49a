"""Defines the interface of a draft source, and the entry by which a source is registered.

A module with an entry is imported wherever a configuration is read. Therefore it should import slow
modules (compiled kernels) only when the source is made.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sam_rollout.automaton.interface import BoolArray, Int32Array, Int64Array
from sam_rollout.core.identity import GroupKey, RequestIdentity
from sam_rollout.core.limits import Limits
from sam_rollout.core.metric import Metric
from sam_rollout.core.settings import Section

__all__ = ["Limits", "Piece", "Scored", "Source", "SourceEntry", "Usage"]

if TYPE_CHECKING:
    from sam_rollout.sources.support.responses import Responses

Identities = Sequence[RequestIdentity | None]  # None for a request without identity


class Piece(NamedTuple):
    """Consecutive tokens of a response, which engines send each other as plain values."""

    split: str  # split, step and group come from the response's identity
    step: int
    group: str
    response: str  # a unique name of the response
    start: int  # number of the response's tokens before this piece
    is_last: bool  # whether the response has ended
    tokens: bytes  # int32, little-endian

    @property
    def group_key(self) -> GroupKey:
        """The group key of the response's identity."""
        return self.split, self.step, self.group


class Scored(NamedTuple):
    """N positions of M texts that the model scored; a text scored in two steps appears twice."""

    request_ids: list[str]  # [M]
    # int32[M], number of a text's positions: its last token, its draft, and padding. A padding
    # position repeats the last token.
    widths: Int32Array
    tokens: Int32Array  # int32[N], the token at each position
    positions: Int32Array  # int32[N], for each position, the next token's index in the text
    # int32[N], index of each position's parent among its text's positions, -1 for the first.
    parents: Int32Array
    likeliest: Int32Array | None  # int32[N], the likeliest next token; None if not asked for
    drawn: Int32Array | None  # int32[N], the drawn next token, negative if unknown


class Usage(NamedTuple):
    """A source's work since it was made, and its present size."""

    catch_up_tokens: int = 0  # tokens read into automata
    rebuilds: int = 0  # texts read again because their row no longer continued them
    evictions: int = 0  # automata given up because there were too many, or too many bytes
    live_requests: int = 0  # present number of live requests
    bytes: int = 0  # present memory


class Source:
    """Base class of the sources: texts, or tables of tokens, from which requests draft.

    In every engine step the drafter calls `bind` if the batch has changed. Then it calls `locate`
    if the gate is open, or `catch_up` if the gate is closed. It calls `settle` last. A row stands
    for the same request until the next `bind`. No method may raise, whatever a row contains.
    """

    name: str  # the key under `sam.sources`, set when the source is made
    needs_identity: bool = False  # whether the source needs requests' identities

    def bind(self, request_ids: Sequence[str], identities: Identities) -> None:
        """Learn which request is in which row; called only when the batch has changed."""

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray) -> None:
        """Read each row's new tokens without drafting; a source may leave them to later calls.

        Args:
            token_ids: int32[R >= B, L]. Row i begins with the text of request i.
            num_tokens: int32[B], number of known tokens of each row; it may grow by any number.
            eligible: bool[B], False for rows to leave alone.
        """

    def locate(
        self, token_ids: Int32Array, num_tokens: Int32Array, eligible: BoolArray, places: Int64Array
    ) -> None:
        """Read each row's new tokens, then write the place from which the row may draft.

        Args:
            token_ids, num_tokens, eligible: see `catch_up`.
            places: where to write, int64[B, PLACE_WIDTH] (`automaton.interface`). A place stays
                valid until the source is called again. Its column PLACE_KIND is NOWHERE if the
                source finds nothing or the row is not eligible; then other columns mean nothing.
        """
        raise NotImplementedError

    def hear(self, scored: Scored) -> None:
        """Learn from positions that the model scored; called after `bind` and before `locate`."""

    def receive(self, tokens: Int32Array, chances: np.ndarray | None) -> None:
        """Take drafts that another drafter made for this step; called before `locate`.

        Args:
            tokens: int32[B, N], one draft per row; it ends at the first negative token.
            chances: float[B, N] in 0..1, the drafter's probability of each token; None if unknown.
        """

    def settle(self) -> None:
        """Bring memory below its limit, after the engine step's drafts were made."""

    def finish(self, request_ids: Collection[str]) -> None:
        """Free the state of requests that ended; unknown ids are skipped."""

    def end_step(self) -> None:
        """Clean up at the end of a training step."""

    def exchange(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """Take in other engines' pieces; return this engine's own pieces since the last call.

        This method is called a few times per second, between engine steps. `origin` is a unique
        name of this engine. Each of `pieces` is a tuple or list of a `Piece`'s fields.
        """
        return []

    def wait(self) -> None:
        """Wait for background work, so that a replay does not depend on timing."""

    def usage(self) -> Usage:
        """Report the figures that every source has."""
        return Usage()

    def counters(self) -> Mapping[str, int]:
        """Report this source's own counts since it was made, by name; see `SourceEntry.metrics`."""
        return {}


@dataclass(frozen=True)
class SourceEntry:
    """A source's entry in the registry."""

    name: str  # the key under `sam.sources`
    section: type[Section]  # the class of its settings, with a field `enabled`
    # A function that makes the source in the engine's worker, from the checked section, the
    # engine's limits and the record of responses. It returns None if the source would have nothing
    # to draft from.
    make: Callable[[Any, Limits, Responses], Source | None]
    order: int  # number by which the sources are sorted
    # Declarations of the figures that `counters` reports, without the prefix `sam/draft/`.
    # `<name>_bytes`, `<name>_evictions` and `<name>_failures` need no declaration.
    metrics: tuple[Metric, ...] = ()
    # A function of the section and the vocabulary's size, called before a model is loaded. It
    # raises ConfigError for faults that the section's fields do not show, such as a missing file.
    check: Callable[[Any, int], object] | None = None
