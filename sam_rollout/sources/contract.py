"""What the drafter asks of a source of drafts, and how a source makes itself known.

A module of this folder that defines `SOURCE`, a `SourceEntry`, is found by the registry
(`sam_rollout.sources`). Its section of the configuration, its metrics and its curves on the
dashboard follow from the entry. Such a module is imported wherever a configuration is read: what is
slow to import (compiled kernels) it imports when the source is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sam_rollout.automaton.interface import Int32Array, Int64Array
from sam_rollout.core.identity import GroupKey, RequestIdentity
from sam_rollout.core.limits import Limits
from sam_rollout.core.metric import Metric
from sam_rollout.core.settings import Section

if TYPE_CHECKING:
    from sam_rollout.sources.support.responses import Responses


class Piece(NamedTuple):
    """Some tokens of a response, on their way to engines that sample siblings of it or keep it.

    Plain values, which every channel carries as they are.
    """

    split: str  # of the response's identity, as the next two
    step: int
    group: str
    response: str  # a name that no other response has
    start: int  # tokens told before these
    is_last: bool  # the response has ended
    is_whole: bool  # told once more when it has ended, to be kept in another folder
    tokens: bytes  # four each, little-endian

    @property
    def group_key(self) -> GroupKey:
        """As the response's identity has it."""
        return self.split, self.step, self.group


class Scored(NamedTuple):
    """Positions that the model scored, in one step or several, M texts one after the other."""

    request_ids: list[str]  # M, whose texts; the same again in the next step
    # int32[M], how many positions follow each other: a text's last token, its draft, and what fills
    # the step up, which is the text's last token again.
    widths: Int32Array
    tokens: Int32Array  # int32[N], the token at each position
    positions: Int32Array  # int32[N], place of the next token in its text
    # int32[N], which of the text's positions each one follows, -1 for its first; in a chain the one
    # before.
    parents: Int32Array
    likeliest: Int32Array | None  # int32[N], what the model held likeliest next, where asked for
    drawn: Int32Array | None  # int32[N], what was drawn next, negative where that is not known


class Usage(NamedTuple):
    """What a source has done since it was made (all but the last two), and what it holds now."""

    catch_up_tokens: int = 0  # read into automata
    rebuilds: int = 0  # texts read again because their row was no continuation
    evictions: int = 0  # automata given up for a cap on their number or bytes
    live_requests: int = 0
    bytes: int = 0


class Source:
    """Text that requests draft from.

    The drafter calls, in every engine step: `bind` if the batch has changed; then, gate open,
    `locate` or, gate closed, `catch_up`; last `settle`. Rows keep their meaning from one `bind` to
    the next. A source that cannot serve a row places it nowhere; it never raises for the content of
    a row.

    Attributes:
        name: as under `sam.sources`.
        needs_identity: asks who a request is, not only which row it is in.
    """

    name: str
    needs_identity: bool = False

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Learn which request is in which row; called only when the batch has changed.

        Args:
            request_ids: B ids in row order, without repetition.
            identities: who they are, in the same order; None where nobody said.
        """
        raise NotImplementedError

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Read what is new in each row, without drafting. A source may leave that to `locate`.

        Args:
            token_ids: int32[R >= B, L], row i begins with the text of request i; read in place.
            num_tokens: int32[B], known tokens of each row; they may grow by any number.
            eligible: bool[B]; rows where it is False are left alone.
        """

    def locate(
        self,
        token_ids: Int32Array,
        num_tokens: Int32Array,
        eligible: np.ndarray,
        out_places: Int64Array,
    ) -> None:
        """Read what is new, then tell where each row's text stands in the source's texts.

        Args:
            token_ids, num_tokens, eligible: as for `catch_up`.
            out_places: int64[B, PLACE_WIDTH] (`automaton.interface`), to hold until the source is
                called again. Of every row at least the column PLACE_KIND is written: NOWHERE where
                the source knows nothing, and where the row is not eligible.
        """
        raise NotImplementedError

    def hear(self, scored: Scored) -> None:
        """Learn from positions that the model scored; after `bind`, before `locate`."""

    def receive(self, tokens: Int32Array, chances: np.ndarray | None) -> None:
        """Take drafts that were made elsewhere for the step under way; before `locate`.

        Args:
            tokens: int32[B, N], row i is request i's draft; it ends at the first negative one.
            chances: float[B, N] in 0..1, what each token was given by who drafted it; None where
                nobody tells.
        """

    def settle(self) -> None:
        """The engine step's drafts are made: bring memory back below its limit."""

    def finish(self, request_ids: Iterable[str]) -> None:
        """Free the state of requests that ended; unknown ids are passed over."""

    def end_step(self) -> None:
        """A training step is over."""

    def exchange(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """Take in what other engines sample, and hand out what this one does.

        Between engine steps, a few times per second, and only where there are other engines.

        Args:
            origin: of this engine, a name that no other has.
            pieces: of responses sampled elsewhere, each to be checked (`read_piece`).

        Returns:
            What is new since the last call.
        """
        return []

    def wait(self) -> None:
        """Wait for work beside the engine, so that a replay finds what an engine would find."""

    def usage(self) -> Usage:
        """What all sources together are asked for."""
        return Usage()

    def counters(self) -> Mapping[str, int]:
        """Own counts since the source was made, by name; metrics if they are declared."""
        return {}

    def levels(self) -> Mapping[str, int]:
        """Own figures as they stand, by name; metrics if they are declared."""
        return {}


@dataclass(frozen=True)
class SourceEntry:
    """How a source makes itself known.

    Attributes:
        name: under `sam.sources`.
        section: of its settings; has a field `enabled`.
        make: builds the source from its checked section, in the engine's worker; None where it
            has nothing to work with. It may read what requests write (`support/responses.py`).
        order: in which sources are asked and listed.
        metrics: of what `counters` and `levels` report, names without `sam/draft/`. `_bytes` and
            `_evictions` are reported for all sources, `_failures` is declared for all.
        check: raises ConfigError for what is wrong with an enabled section beyond its fields (a
            file that is missing, or has tokens beyond the vocabulary), before a model is loaded.
    """

    name: str
    section: type[Section]
    make: Callable[[Any, Limits, Responses], Source | None]
    order: int
    metrics: tuple[Metric, ...] = ()
    check: Callable[[Any, int], object] | None = None
