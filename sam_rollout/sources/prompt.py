"""The source `prompt`: the responses to the same prompt draft from each other.

On each engine, all responses to a prompt share one automaton during a training step. The automaton
also reads the responses that other engines sample (`support/shared_texts.py`). When the first
request with a prompt begins, a thread reads the prompt's responses of earlier steps from disk into
a second automaton. The second automaton then replaces the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sam_rollout.automaton.interface import LARGEST_AUTOMATON, Int32Array
from sam_rollout.core.identity import GroupKey, RequestIdentity
from sam_rollout.core.metric import Metric
from sam_rollout.core.settings import Section, setting
from sam_rollout.sources.contract import Limits, Piece, SourceEntry
from sam_rollout.sources.support.grouped import Group, GroupedTexts
from sam_rollout.sources.support.live_texts import LIVE_BYTES_PER_TOKEN, number_of
from sam_rollout.sources.support.responses import Responses, is_of_training
from sam_rollout.sources.support.shared_texts import Place, SharedTexts

if TYPE_CHECKING:
    from sam_rollout.automaton.pool import AutomatonPool

# The earlier responses to one prompt may take this share of `max_bytes`.
_SHARE_OF_ONE = 1 / 4


@dataclasses.dataclass(frozen=True)
class PromptSourceConfig(Section):
    """Settings of the drafts from other responses to the same prompt."""

    PATH: ClassVar[str] = "sam.sources.prompt"

    enabled: bool = setting(
        True,
        meaning="Draft from the other responses to the same prompt that this engine samples in the "
        "same training step.",
    )
    earlier_steps: bool = setting(
        True,
        meaning="Draft from responses of earlier training steps, too, and keep this step's in "
        "`sam.texts.path`. A run switches this off if no prompt can come back "
        "([rule](#earlier-steps-and-resumed-runs)); it is always off without verl.",
    )
    max_bytes: int = setting(
        4_000_000_000,
        minimum=1 << 20,
        meaning=f"Memory of one engine, in addition to that of `own`: about {LIVE_BYTES_PER_TOKEN} "
        "bytes per token of this step's and earlier responses. If it is full, earlier responses "
        "are dropped first, then prompts whose responses have all ended, then prompts without a "
        "running request.",
    )
    share: bool = setting(
        True,
        meaning="Send each engine, many times per second, what other engines sample for the same "
        "prompts ([many nodes](clusters.md#texts-on-several-nodes)). An engine reads at most 512 "
        "tokens of other engines per step, and none while the source takes more than three "
        "quarters of `max_bytes`.",
    )


class PromptTexts(GroupedTexts[GroupKey]):
    """Keeps one automaton per prompt until the training step is over and all responses have ended.

    A request without identity gets no automaton here. After a group was given up, its later
    requests of the same training step get no automaton either.
    """

    def __init__(self, config: PromptSourceConfig, limits: Limits, responses: Responses) -> None:
        super().__init__(limits, config.max_bytes, responses)
        self._share = config.share
        self._shared = SharedTexts(
            self.pool, limits, config.max_bytes, responses, self._place_of, self._keep_ended
        )
        self._reads_earlier = config.earlier_steps
        if config.earlier_steps:
            responses.want()
        self._reading: dict[GroupKey, Future[AutomatonPool | None]] = {}
        # Prompt -> texts that ended in this training step; the prompt's next automaton reads them.
        self._ended: dict[GroupKey, list[Int32Array]] = {}
        self._ended_bytes = 0
        self._counts = dict.fromkeys(("found", "missing", "evictions"), 0)

    def key_of(self, identity: RequestIdentity | None) -> GroupKey | None:
        """Return the split, step and prompt that siblings have in common."""
        return None if identity is None else identity.group_key

    def _read_others(self) -> None:
        self._shared.read()

    def settle(self) -> None:
        """Switch to automata that have read earlier responses; keep memory below its limit."""
        while self._reading:  # the prompts are in the order of their first requests
            key, reading = next(iter(self._reading.items()))
            if not reading.done():
                break
            del self._reading[key]
            self._take_over(key, reading)
        super().settle()

    def finish(self, request_ids: Collection[str]) -> None:
        """Keep the texts of ended requests, for siblings here and on other engines."""
        self._shared.own.finish(request_ids)
        for response in self._responses.ended.values():
            self._keep_ended(response.identity.group_key, response.text)
        super().finish(request_ids)

    def end_step(self) -> None:
        """Free groups without interrupted responses, once they have no live request."""
        going_on = {*self._responses.interrupted.values()}
        self._given_up &= going_on
        for key in self._reading.keys() - going_on:
            self._reading.pop(key).cancel()
        self._shared.end_step()
        for key in self._groups.keys() - going_on:
            self._end(self._groups[key])

    def exchange(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """Exchange siblings' texts with other engines, if `share` is on."""
        return self._shared.exchange(origin, pieces) if self._share else []

    def wait(self) -> None:
        """Wait until earlier responses are read, and switch to their automata."""
        self._responses.wait()
        self.settle()

    def counters(self) -> Mapping[str, int]:
        """Return the counts for earlier responses and for other engines' texts."""
        earlier = {f"earlier_{name}": count for name, count in self._counts.items()}
        return earlier | self._shared.counters()

    @property
    def _nbytes(self) -> int:
        return super()._nbytes + self._shared.nbytes + self._ended_bytes

    def _make_room(self) -> None:
        """Drop other engines' waiting texts, then earlier responses, idle groups, other groups."""
        self._shared.forget_all()
        for group in [one for one in self._groups.values() if one.seeded_tokens]:
            if self._nbytes <= self._max_bytes:
                return
            self._do_without_earlier(group)
        for group in [one for one in self._groups.values() if not one.slots]:
            if self._nbytes <= self._max_bytes:
                return
            self._give_up(group)
        super()._make_room()

    def _do_without_earlier(self, group: Group[GroupKey]) -> None:
        """Drop a group's earlier responses; a new automaton reads this step's texts gradually."""
        self._succeed(group, self.pool.create())
        self._forget_ended(group.key)  # no later automaton has to read the ended texts
        self._counts["evictions"] += 1
        if group.slots:  # without slots, the group is freed already
            self._give_up(group)

    def _keep_ended(self, key: GroupKey, text: Int32Array) -> None:
        """Keep an ended text of this step if the prompt's next automaton may have to read it."""
        group = self._groups.get(key)
        if group is not None and (key in self._reading or group.seeded_tokens):
            self._ended.setdefault(key, []).append(text)
            self._ended_bytes += text.nbytes

    def _forget_ended(self, key: GroupKey) -> None:
        self._ended_bytes -= sum(text.nbytes for text in self._ended.pop(key, ()))

    def _take_over(self, key: GroupKey, reading: Future[AutomatonPool | None]) -> None:
        """Replace a prompt's automaton by one with the earlier responses, if memory allows it."""
        if (error := reading.exception()) is not None:
            self._forget_ended(key)
            return self._responses.fail(error)
        pool = reading.result()
        self._counts["missing" if pool is None else "found"] += 1
        group = self._groups.get(key)
        if pool is None or group is None or group.is_over:
            return self._forget_ended(key)
        ended = np.array([len(text) for text in self._ended.get(key, ())], np.int64)
        tokens = np.concatenate([self._live_tokens(group), ended])
        needed = pool.nbytes + int(self.pool.nbytes_of_texts(group.automaton, tokens).sum())
        if self._nbytes + needed > self._max_bytes:
            self._counts["evictions"] += 1
            return self._forget_ended(key)
        self._succeed(group, self.pool.adopt(pool), pool.appended_tokens)

    def _place_of(self, piece: Piece) -> Place | None:
        key = piece.group_key
        if key in self._given_up:
            return None
        group = self._groups.get(key)
        return key, None if group is None else group.automaton

    def _begin(self, key: GroupKey, identity: RequestIdentity | None) -> Group[GroupKey]:
        group = super()._begin(key, identity)
        self._shared.attach(key, group.automaton)
        if self._reads_earlier and self._responses.keeps and is_of_training(identity):
            _, step, name = key
            most = int(self._max_bytes * _SHARE_OF_ONE) // LIVE_BYTES_PER_TOKEN
            most = min(most, LARGEST_AUTOMATON // 4)
            self._reading[key] = self._responses.read_earlier(name, step, most)
        return group

    def _succeed(self, group: Group[GroupKey], automaton: int, seeded_tokens: int = 0) -> None:
        self._shared.detach(group.key)
        super()._succeed(group, automaton, seeded_tokens)
        for text in self._ended.get(group.key, ()):
            self._moving.read_to_end(text, automaton, number_of(group.key))
        self._shared.attach(group.key, automaton)

    def _free(self, group: Group[GroupKey]) -> None:
        if group not in self._replaced:
            self._shared.forget(group.key)
            self._forget_ended(group.key)
        super()._free(group)


SOURCE = SourceEntry(
    "prompt",
    PromptSourceConfig,
    PromptTexts,
    order=10,
    metrics=(
        Metric(
            "shared_tokens",
            "tokens",
            "Tokens of other engines that an engine read, counted by each engine that read them. "
            "With several engines 0 means that they do not reach each other.",
        ),
        Metric(
            "shared_lost",
            "pieces",
            "Pieces of responses that did not reach another engine, because it was gone or too "
            "slow to take them. Ended responses that no engine asked for in time are not counted.",
        ),
    ),
)
