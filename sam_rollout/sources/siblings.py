"""The source `siblings`: the responses to one prompt draft from each other.

All responses to a prompt, running or finished, share one automaton while the training step lasts.
They grow in turns, so a row finds what its siblings wrote one engine step ago. The prompt is read
once for all of them. With the scope `run` all responses that the engine samples share one, step
after step, until it grows too large and another one takes over: prompts of one task are solved with
the same phrases.

Siblings that other engines sample are read beside these (`support/shared_texts.py`).

Old text of a run goes by generations. An automaton that has grown too large gets a successor, made
of the newest ended responses beside the engine (`kept_texts.py`). Live requests move there a few
tokens per engine step (`moving.py`), and the old automaton is freed with the last of them. Reading
a long text anew at once would hold up an engine step, so a request that loses its automaton for
want of memory does without until it ends.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, AutomatonFullError, Int32Array
from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.metric import Metric
from sam_rollout.settings import Section, setting
from sam_rollout.sources.contract import Limits, Piece, SourceEntry, Usage
from sam_rollout.sources.support.live import LIVE_BYTES_PER_TOKEN, NO_SLOT, LiveTexts, number_of
from sam_rollout.sources.support.moving import MovingTexts
from sam_rollout.sources.support.shared_texts import Place, SharedTexts

if TYPE_CHECKING:
    from sam_rollout.sources.support.kept_texts import KeptTexts, Seeded

# No automaton that is half as large as can be takes less.
_LEAST_BYTES_OF_LARGE = LARGEST_AUTOMATON // 2 * 16
# What a run shares is replaced when it is so large, of the limit, by a successor that is so large:
# both stand side by side until live requests have moved, with room for growth. The seventh that is
# missing is the text that goes at a change, and so what acceptance may fall by.
_DUE, _SUCCESSOR = 7 / 16, 6 / 16


@dataclasses.dataclass(frozen=True)
class SiblingsSourceConfig(Section):
    """Settings of the drafts from other responses to the same prompt."""

    PATH: ClassVar[str] = "sam.sources.siblings"

    enabled: bool = setting(
        True,
        meaning="Draft from the other responses to the same prompt in the same training step "
        "that this engine samples or has sampled.",
    )
    scope: str = setting(
        "auto",
        choices=("auto", "prompt", "run"),
        meaning="`prompt`: draft from the responses to the same prompt in this step. `run`: "
        "from all responses this engine has sampled, to any prompt and in any step of the run, as "
        "far back as `max_bytes` allows: before what they share becomes too large, a successor "
        "takes over that begins with the newest of it. `auto`: `run` where the responses of "
        "several steps fit, else `prompt`; decided when the run starts, and in one line of its log "
        "([defaults.md](defaults.md#scope)). Without a run, in plain vLLM, `auto` is `prompt`.",
    )
    path: str = setting(
        "",
        allowed="a folder",
        meaning="Of scope `run`: where ended responses are kept for a run that is resumed, at "
        "most as many bytes as `max_bytes` or 64 MiB; empty: `sam/siblings` in the run folder. "
        "Engines that share it begin with each other's. What was learned of drafts' chances is "
        "not kept: it is learned anew from the first few hundred drafts.",
    )
    max_bytes: int = setting(
        2_000_000_000,
        minimum=1 << 20,
        meaning=f"Memory of one engine, about {LIVE_BYTES_PER_TOKEN} bytes per token of the "
        "step's responses, beside that of own text. Beyond it whole groups are given up, those "
        "that are not running first; their requests go on without siblings until they end. With "
        "scope `run` that happens only where live texts alone fill it.",
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

    @property
    def uses_path(self) -> bool:
        """Whether anything is kept on disk."""
        return self.scope == "run"


_GroupKey = tuple[str, int, str]  # split, step, group; of a run: split, which automaton, ""


@dataclasses.dataclass
class _Group:
    automaton: int
    slots: dict[str, int] = dataclasses.field(default_factory=dict)  # of live requests
    is_over: bool = False  # freed with the last live request
    due_at: int = 0  # of a run: bytes below which it is not asked whether a successor is due


class SiblingTexts(LiveTexts):
    """One automaton per prompt, kept until its training step is over and its requests have ended.

    Args:
        config: `scope`, and `max_bytes`, the memory of all automata, checked after every step.
            Beyond it whole groups are given up, the one that has been absent from the batch
            longest first, and so is a group that comes near the largest automaton there can be.
            Its requests do without until they end, and so do those that join them in the same
            training step. Of a run, what was replaced goes first.
        limits: of the engine.

    Attributes:
        restarts: how often what a run shares was replaced by a successor.
        seeded_tokens: tokens of old text that successors began with.
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
        self._kept: KeptTexts | None = None
        if self._of_run:
            from sam_rollout.sources.support.kept_texts import KeptTexts

            self._kept = KeptTexts(limits, config.max_bytes, config.path)
        self._moving = MovingTexts(self.pool)
        self.restarts = 0
        self.seeded_tokens = 0

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """Tell which request is in which row; one without identity shares with the run only."""
        for row, (request_id, identity) in enumerate(zip(request_ids, identities, strict=True)):
            self._slots[row] = self._slot_of(request_id, identity)
        self._bound = list(request_ids)
        self._shared.bind(request_ids, identities)
        if self._kept is not None:
            self._kept.bind(request_ids, identities)

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """As `LiveTexts`; a group is given up that one step carries to the largest automaton."""
        if self._kept is not None:
            self._kept.record(token_ids, num_tokens, eligible)
        while True:
            try:
                self._move(token_ids, num_tokens, eligible)
                super().catch_up(token_ids, num_tokens, eligible)
                return self._shared.step(token_ids, num_tokens, eligible)
            except AutomatonFullError as full:
                automata = {group.automaton: key for key, group in self._groups.items()}
                self._give_up(automata[full.automaton])

    def settle(self) -> None:
        """Give groups up until the rest fits into memory, and let old text of a run go."""
        self._turn_over()
        while self._nbytes > self._max_bytes and self._groups:
            self._give_up(next(iter(self._groups)))
        if self.pool.nbytes > _LEAST_BYTES_OF_LARGE:
            for key, group in list(self._groups.items()):
                if self.pool.places_of_automaton(group.automaton) > LARGEST_AUTOMATON // 2:
                    self._give_up(key)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Requests ended: their texts stay for their siblings. Unknown ids are passed over."""
        ended = list(request_ids)
        self._shared.finish(ended)
        texts = {} if self._kept is None else self._kept.finish(ended)
        for request_id in ended:
            self._moving.finish(request_id, texts.get(request_id))
            self._without.discard(request_id)
            self._leave(request_id)

    def end_step(self) -> None:
        """The training step is over: free groups, those with live requests when these end."""
        self._given_up.clear()
        self._shared.end_step()
        if self._of_run:
            return self._turn_over()
        for key, group in list(self._groups.items()):
            group.is_over = True
            if not group.slots:
                self._free(key)

    def exchange(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """As `Source.exchange`; nothing unless texts are shared."""
        return self._shared.exchange(origin, pieces) if self._share else []

    def wait(self) -> None:
        """As `Source.wait`: successors that are being made take over."""
        if self._kept is None:
            return
        for _ in range(3):  # what was read is made something of, what ended meanwhile is added
            self._kept.wait()
            self._turn_over()

    def usage(self) -> Usage:
        """As `LiveTexts`, with texts that are kept; one that moves is one request, others' none."""
        usage = super().usage()
        requests = usage.live_requests - len(self._moving) - self._shared.slots
        return usage._replace(live_requests=requests, bytes=self._nbytes)

    def counters(self) -> Mapping[str, int]:
        """Automata given up, and replaced; what became of other engines' texts."""
        own = {
            "siblings_evictions": self.evictions,
            "siblings_restarts": self.restarts,
            "siblings_seeded_tokens": self.seeded_tokens,
            "siblings_failures": 0 if self._kept is None else self._kept.failures,
        }
        return own | self._shared.counters()

    def levels(self) -> Mapping[str, int]:
        """Automata and their memory."""
        return {"siblings_groups": len(self._groups), "siblings_bytes": self._nbytes}

    @property
    def _nbytes(self) -> int:
        """All memory: automata, those that are being made, and texts."""
        kept = 0 if self._kept is None else self._kept.nbytes
        return self.pool.nbytes + self._shared.nbytes + kept

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
            number = 0
            if identity is not None:
                number = number_of(identity.split, identity.step, identity.group)
            group.slots[request_id] = self.pool.open(group.automaton, number)
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

    def _turn_over(self) -> None:
        """Have a successor made of what a run shares, if it is due; let it take over when made."""
        if self._kept is None:
            return
        for key, group in list(self._groups.items()):
            split = key[0]
            if group.is_over:
                continue
            if self._kept.is_making(split):
                if (seeded := self._kept.take(split)) is not None:
                    self._succeed(key, seeded)
            elif self._kept.arrived(split) or self._is_due(split, group):
                self._kept.make(split, self._room_for_old_text(group))

    def _is_due(self, split: str, group: _Group) -> bool:
        """Whether it is so large that it has to be replaced, and another one would be smaller."""
        nbytes = self.pool.nbytes_of_automaton(group.automaton)
        if nbytes < group.due_at:
            return False
        places = self.pool.places_of_automaton(group.automaton)
        full = nbytes > self._max_bytes * _DUE or places > LARGEST_AUTOMATON // 2 * _DUE
        if not full or any(one.is_over and key[0] == split for key, one in self._groups.items()):
            return False
        # Not at every engine step, where live texts fill it or nothing can be made.
        group.due_at = nbytes + self._max_bytes // 32
        return self._room_for_old_text(group) > 0

    def _room_for_old_text(self, group: _Group) -> int:
        """Tokens of ended texts with which a successor, live ones added, is as large as allowed."""
        limit = min(LARGEST_AUTOMATON // 2, self._max_bytes // LIVE_BYTES_PER_TOKEN)
        # Beside it, in memory, by what a token takes here; a little is left for growth meanwhile.
        nbytes = self.pool.nbytes_of_automaton(group.automaton)
        places = self.pool.places_of_automaton(group.automaton)
        free = (self._max_bytes * 7 // 8 - self._nbytes) * places // max(nbytes, 1)
        live = sum(self.pool.length(slot) for slot in group.slots.values())
        return min(int(limit * _SUCCESSOR), free) - live

    def _succeed(self, key: _GroupKey, seeded: Seeded) -> None:
        """Let requests share a successor from now on; live ones move there."""
        group = self._groups[key]
        group.is_over = True
        automaton = self.pool.adopt(seeded.pool, seeded.automaton)
        self._replace(key)
        due_at = self.pool.nbytes_of_automaton(automaton) + self._max_bytes // 32
        successor = _Group(automaton, due_at=due_at)
        new = (key[0], self._replaced[key[0]], "")
        self._groups[new] = successor
        self._shared.attach(new, automaton)
        self._moving.begin(group.slots, automaton)
        if not group.slots:
            self._free(key)
        self.restarts += 1
        self.seeded_tokens += seeded.tokens

    def _move(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Read on what moves; requests that have caught up draft from the successor."""
        moved = self._moving.read(self._bound, token_ids, num_tokens, eligible)
        if not moved:
            return
        keys = {group.automaton: key for key, group in self._groups.items()}
        for row, slot, automaton in moved:
            request_id, key = self._bound[row], keys[automaton]
            self._leave(request_id)
            self._without.discard(request_id)
            self._key_of[request_id] = key
            self._groups[key].slots[request_id] = slot
            self._slots[row] = slot

    def _leave(self, request_id: str) -> None:
        """A request has no part in its group any more, if it has one; its text stays."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return
        group = self._groups[key]
        self.pool.close(group.slots.pop(request_id))
        if group.is_over and not group.slots:
            self._free(key)

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
        self._moving.drop_all_to(group.automaton)
        for slot in group.slots.values():
            self.pool.close(slot)
        self.pool.destroy(group.automaton)


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
            "split that stays, and those it replaced whose requests have not moved yet.",
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
            "With scope run: automata that had grown too large and were replaced by a successor, "
            "made of the newest texts; or by one made of what an interrupted run had kept. No "
            "request loses its drafts by that.",
        ),
        Metric(
            "siblings_seeded_tokens",
            "tokens",
            "With scope run: tokens of old text that successors began with.",
        ),
        Metric(
            "siblings_failures",
            "failures",
            "With scope run: errors of reading, keeping or taking over old texts, survived by "
            "going on without.",
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
