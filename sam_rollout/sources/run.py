"""The source `run`: all responses that an engine samples draft from each other, step after step.

They share one automaton, since prompts of one task are solved with the same phrases. It votes
beside `siblings`, which knows this prompt and step only. Texts of other engines are left to that.

Old text goes by generations. An automaton that has grown too large gets a successor, made of the
newest ended responses beside the engine (`support/kept_texts.py`). Live requests move there a few
tokens per engine step (`support/moving.py`), and the old automaton is freed with the last of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, Int32Array
from sam_rollout.identity import TRAIN_SPLIT, RequestIdentity
from sam_rollout.metric import Metric
from sam_rollout.settings import Section, setting
from sam_rollout.sources.contract import Limits, SourceEntry, Usage
from sam_rollout.sources.support.grouped import Group, GroupedTexts
from sam_rollout.sources.support.live import LIVE_BYTES_PER_TOKEN
from sam_rollout.sources.support.moving import MovingTexts

if TYPE_CHECKING:
    from sam_rollout.sources.support.kept_texts import Seeded

# An automaton is replaced when it is so large, of the limit, by a successor that is so large: both
# stand side by side until live requests have moved, with room for growth. The seventh that is
# missing is the text that goes at a change, and so what acceptance may fall by.
_DUE, _SUCCESSOR = 7 / 16, 6 / 16


@dataclasses.dataclass(frozen=True)
class RunSourceConfig(Section):
    """Settings of the drafts from all responses of the run."""

    PATH: ClassVar[str] = "sam.sources.run"

    enabled: bool = setting(
        True,
        meaning="Draft from all responses this engine has sampled, to any prompt and in any step "
        "of the run, as far back as `max_bytes` allows: before what they share becomes too large, "
        "a successor takes over that begins with the newest of it. Texts of other engines are "
        "left to `siblings`.",
    )
    when: str = setting(
        "fits",
        choices=("fits", "always"),
        meaning="`fits`: only where the responses of several steps fit; decided when the run "
        "starts, and in one line of its log ([defaults.md](defaults.md#run)). Without a run, in "
        "plain vLLM, `fits` is off.",
    )
    max_bytes: int = setting(
        2_000_000_000,
        minimum=1 << 20,
        meaning=f"Memory of one engine, about {LIVE_BYTES_PER_TOKEN} bytes per token, beside that "
        "of own text and siblings. Where live texts alone fill it, what they share is given up; "
        "they go on without until they end.",
    )
    path: str = setting(
        "",
        allowed="a folder",
        meaning="Where ended responses are kept for a run that is resumed, at most 64 MiB; empty: "
        "`sam/run` in the run folder. Engines that share it begin with each other's. What was "
        "learned of drafts' chances is not kept: it is learned anew.",
    )


_Key = tuple[str, int]  # split, which of its automata


class RunTexts(GroupedTexts[_Key]):
    """One automaton per split, and those it replaced until their requests have moved.

    A request without identity shares that of training.

    Args:
        config: `max_bytes`, of automata and kept texts; what was replaced is given up first.
        limits: of the engine.

    Attributes:
        restarts: how often an automaton was replaced by a successor.
        seeded_tokens: tokens of old text that successors began with.
    """

    name = "run"

    def __init__(self, config: RunSourceConfig, limits: Limits) -> None:
        from sam_rollout.sources.support.kept_texts import KeptTexts

        super().__init__(limits, config.max_bytes)
        self._replaced: Counter[str] = Counter()  # by split: automata before this one
        self._due_at: dict[_Key, int] = {}  # bytes below which it is not asked for a successor
        self._kept = KeptTexts(limits, config.max_bytes, config.path)
        self._moving = MovingTexts(self.pool)
        self.restarts = 0
        self.seeded_tokens = 0

    def key_of(self, identity: RequestIdentity | None) -> _Key:
        """As `GroupedTexts`."""
        split = TRAIN_SPLIT if identity is None else identity.split
        return split, self._replaced[split]

    def bind(
        self, request_ids: Sequence[str], identities: Sequence[RequestIdentity | None]
    ) -> None:
        """As `GroupedTexts`."""
        super().bind(request_ids, identities)
        for key in [key for key, group in self._groups.items() if group.is_over]:
            self._groups.move_to_end(key, last=False)  # given up first
        self._kept.bind(request_ids, identities)

    def catch_up(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """As `GroupedTexts`; texts are kept."""
        self._kept.record(token_ids, num_tokens, eligible)
        super().catch_up(token_ids, num_tokens, eligible)

    def settle(self) -> None:
        """As `GroupedTexts`; successors are made and take over."""
        self._turn_over()
        super().settle()

    def finish(self, request_ids: Iterable[str]) -> None:
        """As `GroupedTexts`."""
        ended = list(request_ids)
        texts = self._kept.finish(ended)
        for request_id in ended:
            self._moving.finish(request_id, texts.get(request_id))
        super().finish(ended)

    def end_step(self) -> None:
        """Texts stay; old ones go if they are due."""
        self._given_up.clear()
        self._turn_over()

    def wait(self) -> None:
        """As `Source.wait`: successors that are being made take over."""
        for _ in range(3):  # what was read is made something of, what ended meanwhile is added
            self._kept.wait()
            self._turn_over()

    def usage(self) -> Usage:
        """As `GroupedTexts`; a request that moves is one request."""
        usage = super().usage()
        live = usage.live_requests - len(self._moving)
        return usage._replace(live_requests=live, refused_texts=self._kept.refused)

    def counters(self) -> Mapping[str, int]:
        """Automata given up, and replaced."""
        return {
            "run_evictions": self.evictions,
            "run_restarts": self.restarts,
            "run_seeded_tokens": self.seeded_tokens,
            "run_failures": self._kept.failures,
        }

    def levels(self) -> Mapping[str, int]:
        """Memory."""
        return {"run_bytes": self._nbytes}

    @property
    def _nbytes(self) -> int:
        """Automata, those that are being made, and texts."""
        return super()._nbytes + self._kept.nbytes

    def _turn_over(self) -> None:
        """Have a successor made for what is due; let it take over when it is made."""
        for key, group in list(self._groups.items()):
            split = key[0]
            if group.is_over:
                continue
            if self._kept.is_making(split):
                if (seeded := self._kept.take(split)) is not None:
                    self._succeed(key, seeded)
            elif self._is_moving(split):
                continue
            elif self._kept.arrived(split) or self._is_due(key, group):
                nbytes_of = functools.partial(self.pool.nbytes_of_text, group.automaton)
                self._kept.make(split, *self._room_for_old_text(group), nbytes_of)

    def _is_moving(self, split: str) -> bool:
        """Whether live requests have yet to leave an automaton that was replaced."""
        return any(group.is_over and key[0] == split for key, group in self._groups.items())

    def _is_due(self, key: _Key, group: Group) -> bool:
        """Whether it is so large that it has to be replaced, and another one would be smaller."""
        nbytes = self.pool.nbytes_of_automaton(group.automaton)
        if nbytes < self._due_at.get(key, 0):
            return False
        places = self.pool.places_of_automaton(group.automaton)
        if nbytes <= self._max_bytes * _DUE and places <= LARGEST_AUTOMATON // 2 * _DUE:
            return False
        # Not at every engine step, where live texts fill it or nothing can be made.
        self._due_at[key] = nbytes + self._max_bytes // 32
        return min(self._room_for_old_text(group)) > 0

    def _room_for_old_text(self, group: Group) -> tuple[int, int]:
        """Ended texts with which a successor, live ones added, is as large as allowed.

        Returns:
            Their tokens, and the bytes that are left for them: short texts take more per token.
        """
        limit = min(LARGEST_AUTOMATON // 2, self._max_bytes // LIVE_BYTES_PER_TOKEN)
        live = [self.pool.length(slot) for slot in group.slots.values()]
        # Beside it, in memory, by what texts take here; a little is left for growth meanwhile.
        free = self._max_bytes * 7 // 8 - self._nbytes
        free -= sum(self.pool.nbytes_of_text(group.automaton, tokens) for tokens in live)
        return int(limit * _SUCCESSOR) - sum(live), free

    def _succeed(self, key: _Key, seeded: Seeded) -> None:
        """Let requests share a successor from now on; live ones move there."""
        automaton = self.pool.adopt(seeded.pool, seeded.automaton)
        new = self._replace(key)
        self._groups[new] = Group(automaton)
        self._due_at[new] = self.pool.nbytes_of_automaton(automaton) + self._max_bytes // 32
        self._moving.begin(self._groups[key].slots, automaton)
        self._end(key)
        self.restarts += 1
        self.seeded_tokens += seeded.tokens

    def _read(self, token_ids: Int32Array, num_tokens: Int32Array, eligible: np.ndarray) -> None:
        """Read on in what moves, too; requests that have caught up draft from the successor."""
        moved = self._moving.read(self._bound, token_ids, num_tokens, eligible)
        keys = {group.automaton: key for key, group in self._groups.items()} if moved else {}
        for row, slot, automaton in moved:
            request_id, key = self._bound[row], keys[automaton]
            self._leave(request_id)
            self._without.discard(request_id)
            self._key_of[request_id] = key
            self._groups[key].slots[request_id] = slot
            self._slots[row] = slot
        super()._read(token_ids, num_tokens, eligible)

    def _replace(self, key: _Key) -> _Key:
        """What requests that come from now on share instead."""
        split, number = key
        self._replaced[split] = number + 1
        return split, number + 1

    def _give_up(self, key: _Key) -> None:
        if not self._groups[key].is_over:
            self._replace(key)
        super()._give_up(key)

    def _free(self, key: _Key) -> None:
        self._moving.drop_all_to(self._groups[key].automaton)
        self._due_at.pop(key, None)
        super()._free(key)


def _make(config: RunSourceConfig, limits: Limits) -> RunTexts | None:
    """Without a run nobody has decided that several steps fit."""
    return RunTexts(config, limits) if config.when == "always" else None


SOURCE = SourceEntry(
    "run",
    RunSourceConfig,
    _make,
    order=15,
    metrics=(
        Metric(
            "run_restarts",
            "automata",
            "Automata that had grown too large and were replaced by a successor, made of the "
            "newest texts; or by one made of what an interrupted run had kept. No request loses "
            "its drafts by that.",
        ),
    ),
    benchmark=lambda folder: {"when": "always"},
)
