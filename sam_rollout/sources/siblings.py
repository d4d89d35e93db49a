"""The source `siblings`: the responses to one prompt draft from each other.

All responses to a prompt, running or finished, share one automaton while the training step lasts.
They grow in turns, so a row finds what its siblings wrote one engine step ago. The prompt is read
once for all of them. Siblings that other engines sample are read beside these
(`support/shared_texts.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.identity import GroupKey, RequestIdentity
from sam_rollout.metric import Metric
from sam_rollout.settings import Section, setting
from sam_rollout.sources.contract import Limits, Piece, SourceEntry, Usage
from sam_rollout.sources.support.grouped import GroupedTexts
from sam_rollout.sources.support.live import LIVE_BYTES_PER_TOKEN
from sam_rollout.sources.support.shared_texts import Place, SharedTexts


@dataclasses.dataclass(frozen=True)
class SiblingsSourceConfig(Section):
    """Settings of the drafts from other responses to the same prompt."""

    PATH: ClassVar[str] = "sam.sources.siblings"

    enabled: bool = setting(
        True,
        meaning="Draft from the other responses to the same prompt in the same training step "
        "that this engine samples or has sampled, or, with `share`, others do.",
    )
    max_bytes: int = setting(
        2_000_000_000,
        minimum=1 << 20,
        meaning=f"Memory of one engine, about {LIVE_BYTES_PER_TOKEN} bytes per token of the "
        "step's responses, beside that of own text. Beyond it whole groups are given up, those "
        "that are not running first; their requests go on without siblings until they end.",
    )
    share: bool = setting(
        True,
        meaning="Where a rollout has several engines: tell each what the others sample of the "
        "prompts it samples itself, many times per second while they do. Then it hardly matters on "
        "which engines siblings run. An engine reads at most 512 tokens of others per step, "
        "and none beyond three quarters of `max_bytes`; a text that gets lost costs acceptance, "
        "nothing else. See [many nodes](multinode.md#texts-of-other-replicas).",
    )


class SiblingTexts(GroupedTexts[GroupKey]):
    """One automaton per prompt, kept until its training step is over and its requests have ended.

    A request without identity shares none. Where a group was given up, requests that join it in
    the same training step do without, too.

    Args:
        config: `max_bytes`, of all groups together, and `share`.
        limits: of the engine.
    """

    name = "siblings"

    def __init__(self, config: SiblingsSourceConfig, limits: Limits) -> None:
        super().__init__(limits, config.max_bytes)
        self._share = config.share
        self._shared = SharedTexts(self.pool, limits, config.max_bytes, self._place_of)

    def key_of(self, identity: RequestIdentity | None) -> GroupKey | None:
        """As `GroupedTexts`."""
        return None if identity is None else identity.group_key

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `GroupedTexts`."""
        super().bind(request_ids, identities)
        self._shared.bind(request_ids, identities)

    def _make_room(self) -> None:
        """As `GroupedTexts`; texts of other engines that wait go first."""
        self._shared.forget_others()
        super()._make_room()

    def finish(self, request_ids: Iterable[str]) -> None:
        """As `GroupedTexts`; other engines are told how the responses ended."""
        ended = list(request_ids)
        self._shared.finish(ended)
        super().finish(ended)

    def end_step(self) -> None:
        """The training step is over: free groups, those with live requests when these end."""
        self._given_up.clear()
        self._shared.end_step()
        for key in list(self._groups):
            self._end(key)

    def exchange(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """As `Source.exchange`; nothing unless texts are shared."""
        return self._shared.exchange(origin, pieces) if self._share else []

    def usage(self) -> Usage:
        """As `GroupedTexts`; texts of other engines are no requests."""
        usage = super().usage()
        return usage._replace(live_requests=usage.live_requests - self._shared.slots)

    def counters(self) -> Mapping[str, int]:
        """Automata given up; what became of other engines' texts."""
        return {"siblings_evictions": self.evictions} | self._shared.counters()

    def levels(self) -> Mapping[str, int]:
        """Automata, and all memory."""
        return {"siblings_groups": len(self._groups), "siblings_bytes": self._nbytes}

    @property
    def _nbytes(self) -> int:
        return super()._nbytes + self._shared.nbytes

    def _place_of(self, piece: Piece) -> Place | None:
        """Where a piece belongs; None if its group is given up."""
        key = piece.group_key
        if key in self._given_up:
            return None
        group = self._groups.get(key)
        return key, None if group is None else group.automaton

    def _read(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        super()._read(token_ids, num_tokens, eligible)
        self._shared.step(token_ids, num_tokens, eligible)

    def _begin(self, key: GroupKey) -> None:
        super()._begin(key)
        self._shared.attach(key, self._groups[key].automaton)

    def _free(self, key: GroupKey) -> None:
        self._shared.forget(key)
        super()._free(key)


SOURCE = SourceEntry(
    "siblings",
    SiblingsSourceConfig,
    SiblingTexts,
    order=10,
    metrics=(
        Metric(
            "shared_tokens",
            "tokens",
            "Tokens that other engines sampled and that were read here, once by each engine that "
            "did. 0 with several engines: they do not reach each other.",
        ),
        Metric(
            "shared_lost",
            "pieces",
            "Pieces that did not reach another engine, or could not be handed to one: it was gone, "
            "or slower than they came. Not counted: responses that nobody asked for between their "
            "end and the training step's, or before their place was needed.",
        ),
    ),
    benchmark=lambda folder: {},
)
