"""The source `siblings`: the responses to one prompt draft from each other.

All responses to a prompt, running or finished, share one automaton while the training step lasts.
They grow in turns, so a row finds what its siblings wrote one engine step ago. The prompt is read
once for all of them. With the scope `run` all responses that the engine samples share one, step
after step, until it grows too large and another one takes over: prompts of one task are solved with
the same phrases.

Siblings that other engines sample are read beside these (`support/shared_texts.py`).

No request changes its automaton: reading a long text anew would hold up an engine step, and all of
them at once for seconds. One that loses its automaton does without until it ends.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, AutomatonFullError, Int32Array
from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.metric import Metric
from sam_rollout.settings import Section, setting
from sam_rollout.sources.contract import Limits, Piece, SourceEntry, Usage
from sam_rollout.sources.support.live import LIVE_BYTES_PER_TOKEN, NO_SLOT, LiveTexts
from sam_rollout.sources.support.shared_texts import Place, SharedTexts

# No automaton that is half as large as can be takes less.
_LEAST_BYTES_OF_LARGE = LARGEST_AUTOMATON // 2 * 16


@dataclasses.dataclass(frozen=True)
class SiblingsSourceConfig(Section):
    """Settings of the drafts from other responses to the same prompt."""

    PATH: ClassVar[str] = "sam.sources.siblings"

    enabled: bool = setting(
        True,
        meaning="Draft from the other responses to the same prompt in the same training step "
        "that this engine samples or has sampled. Which of the two a request drafts from is "
        "decided by how many tokens are expected to be accepted, from what this engine "
        "verified so far; at first by the longer match. A draft from siblings goes on at "
        "every token the way most of them went; [results.md](results.md) compares that with "
        "what followed the latest occurrence (`own + siblings, latest`).",
    )
    scope: str = setting(
        "auto",
        choices=("auto", "prompt", "run"),
        meaning="`prompt`: draft from the responses to the same prompt in this step. `run`: "
        "from all responses this engine has sampled, to any prompt and in any step of the run; "
        "after a step that leaves what they share half as large as it may be, requests that "
        "come later share anew. `auto`: `run` where the responses of several steps fit, else "
        "`prompt`; decided when the run starts, and in one line of its log "
        "([defaults.md](defaults.md#scope)). Without a run, in plain vLLM, `auto` is `prompt`.",
    )
    max_bytes: int = setting(
        2_000_000_000,
        minimum=1 << 20,
        meaning=f"Memory of one engine, about {LIVE_BYTES_PER_TOKEN} bytes per token of the "
        "step's responses, beside that of own text. Beyond it whole groups are given up, those "
        "that are not running first; their requests go on without siblings until they end. With "
        "scope `run`, requests that come later share anew.",
    )
    share: bool = setting(
        True,
        meaning="Where a rollout has several engines: tell each what the others sample of the "
        "prompts it samples itself, many times per second while they do. Then it hardly matters on "
        "which engines siblings run. An engine reads at most 512 tokens of others per step, "
        "and none beyond three quarters of `max_bytes`; a text that gets lost costs acceptance, "
        "nothing else. See [many nodes](multinode.md#texts-of-other-replicas).",
    )
    routing: str = setting(
        "spread",
        choices=("spread", "grouped"),
        meaning="Which engine a request goes to. `spread`: where the fewest run, verl's own "
        "rule. `grouped`: siblings follow each other to one engine, within the next two "
        "bounds. See [below](#routing-siblings).",
    )
    max_siblings_per_replica: int = setting(
        0,
        minimum=0,
        meaning="Of `grouped`: most siblings of a prompt that an engine gets before every "
        "other has got as many; 0: no limit.",
    )
    max_imbalance: int = setting(
        16,
        minimum=1,
        meaning="Of `grouped`: an engine is not followed while it runs as many requests more "
        "than the mean of all. Below the number of siblings, groups are split even where "
        "nothing else runs.",
    )


_GroupKey = tuple[str, int, str]  # split, step, group; of a run: split, which automaton, ""


@dataclasses.dataclass
class _Group:
    automaton: int
    slots: dict[str, int] = dataclasses.field(default_factory=dict)  # of live requests
    is_over: bool = False  # freed with the last live request


class SiblingTexts(LiveTexts):
    """One automaton per prompt, kept until its training step is over and its requests have ended.

    Args:
        config: `scope`, and `max_bytes`, the memory of all automata, checked after every step.
            Beyond it whole groups are given up, the one that has been absent from the batch
            longest first, and so is a group that comes near the largest automaton there can be.
            Its requests do without until they end, and so do those that join them in the same
            training step. What all responses of a run share is replaced instead: requests that
            come later share another one. After a step that leaves it at half of either limit it
            is replaced as well, and freed when its live requests have ended.
        limits: of the engine.

    Attributes:
        restarts: how often what a run shares was replaced at the end of a step.
    """

    name = "siblings"
    needs_identity = True

    def __init__(self, config: SiblingsSourceConfig, limits: Limits) -> None:
        super().__init__(limits)
        self._max_bytes = config.max_bytes
        self._of_run = config.scope == "run"  # "auto" was decided by the launcher, or is "prompt"
        self._groups: OrderedDict[_GroupKey, _Group] = OrderedDict()  # longest absent first
        self._key_of: dict[str, _GroupKey] = {}  # of live requests
        self._given_up: set[_GroupKey] = set()
        self._without: set[str] = set()  # live requests that do without
        self._replaced: Counter[str] = Counter()  # by split: automata of the run before this one
        self._bound: list[str] = []
        self._share = config.share
        self._shared = SharedTexts(self.pool, limits, config.max_bytes, self._place_of)
        self.restarts = 0

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Tell which request is in which row; one without identity shares with the run only."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            self._slots[row] = self._slot_of(request_id, identity)
        self._bound = list(request_ids)
        self._shared.bind(request_ids, identities)

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """As `LiveTexts`; a group is given up that one step carries to the largest automaton."""
        while True:
            try:
                super().catch_up(token_ids, num_tokens, eligible)
                return self._shared.step(token_ids, num_tokens, eligible)
            except AutomatonFullError as full:
                automata = {group.automaton: key for key, group in self._groups.items()}
                self._give_up(automata[full.automaton])

    def settle(self) -> None:
        """Give groups up until the rest fits into memory."""
        while self._nbytes > self._max_bytes and self._groups:
            self._give_up(next(iter(self._groups)))
        if self.pool.nbytes > _LEAST_BYTES_OF_LARGE:
            for key, group in list(self._groups.items()):
                if self.pool.places_of_automaton(group.automaton) > LARGEST_AUTOMATON // 2:
                    self._give_up(key)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests ended: their texts stay for their siblings. Unknown ids are passed over."""
        self._shared.finish(request_ids)
        for request_id in request_ids:
            self._without.discard(request_id)
            key = self._key_of.pop(request_id, None)
            if key is None:
                continue
            group = self._groups[key]
            self.pool.close(group.slots.pop(request_id))
            if group.is_over and not group.slots:
                self._free(key)

    def end_step(self) -> None:
        """The training step is over: free groups, those with live requests when these end."""
        self._given_up.clear()
        self._shared.end_step()
        for key, group in list(self._groups.items()):
            if self._of_run and not group.is_over:
                if not self._is_half_full(group):
                    continue
                self._replace(key)
                self.restarts += 1
            group.is_over = True
            if not group.slots:
                self._free(key)

    def exchange(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """As `Source.exchange`; nothing unless texts are shared."""
        return self._shared.exchange(origin, pieces) if self._share else []

    def usage(self) -> Usage:
        """As `LiveTexts`; texts of other engines are no requests."""
        usage = super().usage()
        requests = usage.live_requests - self._shared.slots
        return usage._replace(live_requests=requests, bytes=self._nbytes)

    def counters(self) -> Mapping[str, int]:
        """Automata given up, and replaced; what became of other engines' texts."""
        own = {"siblings_evictions": self.evictions, "siblings_restarts": self.restarts}
        return own | self._shared.counters()

    def levels(self) -> Mapping[str, int]:
        """Automata and their memory."""
        return {"siblings_groups": len(self._groups), "siblings_bytes": self._nbytes}

    @property
    def _nbytes(self) -> int:
        return self.pool.nbytes + self._shared.nbytes

    def _place_of(self, piece: Piece) -> Place | None:
        """Where a piece belongs; None if its group is given up."""
        identity = RequestIdentity(piece.group, 0, piece.step, piece.split, key=0)
        key = self._group_of(identity)
        if key is None or key in self._given_up:
            return None
        group = self._groups.get(key)
        return key, None if group is None else group.automaton

    def _slot_of(self, request_id: str, identity: RequestIdentity | None) -> int:
        """The slot of a request that is in the batch."""
        if (key := self._key_of.get(request_id)) is None:
            key = self._group_of(identity)
            if key in self._given_up:
                self._without.add(request_id)
            if key is None or request_id in self._without:
                return NO_SLOT
            if key not in self._groups:
                self._groups[key] = _Group(self.pool.create())
                self._shared.attach(key, self._groups[key].automaton)
            self._key_of[request_id] = key
            group = self._groups[key]
            group.slots[request_id] = self.pool.open(group.automaton, _number_of(identity))
        group = self._groups[key]
        if not (self._of_run and group.is_over):  # what was replaced is given up first
            self._groups.move_to_end(key)
        return group.slots[request_id]

    def _group_of(self, identity: RequestIdentity | None) -> _GroupKey | None:
        """What a request shares its automaton by, None if it shares none."""
        if self._of_run:
            split = TRAIN_SPLIT if identity is None else identity.split
            return (split, self._replaced[split], "")
        return None if identity is None else (identity.split, identity.step, identity.group)

    def _is_half_full(self, group: _Group) -> bool:
        return (
            self.pool.places_of_automaton(group.automaton) > LARGEST_AUTOMATON // 4
            or self.pool.nbytes_of_automaton(group.automaton) > self._max_bytes // 2
        )

    def _replace(self, key: _GroupKey) -> None:
        """Let requests of a run that come from now on share another automaton."""
        self._replaced[key[0]] += 1

    def _give_up(self, key: _GroupKey) -> None:
        group = self._groups[key]
        for request_id in group.slots:
            self._key_of.pop(request_id)
            self._without.add(request_id)
            if request_id in self._bound:
                self._slots[self._bound.index(request_id)] = NO_SLOT
        self._free(key)
        if not self._of_run:
            self._given_up.add(key)
        elif not group.is_over:
            self._replace(key)
        self.evictions += 1

    def _free(self, key: _GroupKey) -> None:
        group = self._groups.pop(key)
        self._shared.forget(key)
        for slot in group.slots.values():
            self.pool.close(slot)
        self.pool.destroy(group.automaton)


def _number_of(identity: RequestIdentity | None) -> int:
    """The same for siblings, to tell their texts from those of other prompts; below 2**31."""
    if identity is None:
        return 0
    return zlib.crc32(f"{identity.split}/{identity.step}/{identity.group}".encode()) >> 1


SOURCE = SourceEntry(
    "siblings",
    SiblingsSourceConfig,
    SiblingTexts,
    order=10,
    metrics=(
        Metric(
            "siblings_groups",
            "groups",
            "Automata that responses share when the step is drained, one for each prompt: what is "
            "left then waits for requests that are still running. With scope run one for each "
            "split that stays, and those it replaced whose requests are still running.",
        ),
        Metric("siblings_bytes", "bytes", "Memory of these automata; part of bytes."),
        Metric(
            "siblings_evictions",
            "groups",
            "Automata given up before their requests ended: for max_bytes, or because they came "
            "near 2^24 tokens; part of evictions.",
        ),
        Metric(
            "siblings_restarts",
            "automata",
            "With scope run: automata replaced after a step because they were half as large as "
            "they may be. No request loses its drafts by that.",
        ),
        Metric(
            "shared_tokens",
            "tokens",
            "Tokens that other engines sampled and that were read into these automata, once by "
            "each engine that did; part of catch_up_tokens. 0 with one engine.",
        ),
        Metric(
            "shared_missed_tokens",
            "tokens",
            "Tokens of other engines that arrived and were not read: no request of their prompt "
            "came to this engine, theirs ended first, or memory or places were short.",
        ),
        Metric(
            "shared_refused",
            "pieces",
            "Pieces of other engines' responses that were malformed, had token ids beyond the "
            "model's, or reached beyond its longest text.",
        ),
        Metric(
            "shared_lost",
            "pieces",
            "Pieces that did not reach another engine, or could not be handed to one: it was gone, "
            "or slower than they came.",
        ),
    ),
    benchmark=lambda folder: {},
)
