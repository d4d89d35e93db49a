"""Makes an engine's drafts between two forward passes of the model.

An adapter (vLLM's proposer, vllm-ascend's runner, the benchmarks) calls `DraftSession.step` with
the texts and gets drafts. `step` has these stages:

1. The session registers which requests joined the batch, left it or ended.
2. It counts how many tokens of the last drafts were accepted (`Verified`).
3. The gate decides how many tokens each request may draft at most (the budget).
4. The drafter reads every text's new tokens. It drafts if the budget is above 0.
5. If the step has to keep the shape of a captured graph, drafts are filled up (`padding.py`).
6. The step is recorded.

An engine may prepare its next step before the drafts are known. Such a step has exactly k draft
tokens per request, padding included. Then `DraftSession.step` does not wait for the gate, but
drafts if the gate's last decision was to open. Later, while the engine computes, the adapter calls
`DraftSession.settle`, in which the gate decides again and the step is recorded.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from sam_rollout.automaton.interface import Int32Array
from sam_rollout.config import SamConfig
from sam_rollout.core.identity import RequestIdentity
from sam_rollout.core.limits import Limits
from sam_rollout.drafting.drafter import SamDrafter
from sam_rollout.drafting.in_flight import DraftBatch
from sam_rollout.gating import EngineStep, Exchange, hands_over, make_gate
from sam_rollout.gating.model_price import ModelPrice
from sam_rollout.session.adapter import NO_HOOKS, EngineHooks, Requests
from sam_rollout.session.bookkeeping import Bookkeeping
from sam_rollout.session.made_drafts import MadeDrafts
from sam_rollout.session.padding import DraftPadding
from sam_rollout.sources.contract import Piece

logger = logging.getLogger(__name__)


def why_chains(config: SamConfig) -> str:
    """Return the reason why these settings rule out draft trees; "" if they allow trees."""
    if config.max_draft_tokens == 1:
        return "a tree of one token is a chain"
    if config.draft_shape == "auto" and config.gate.kind != "auto":
        return f"the gate {config.gate.kind} measures nothing"
    return ""


def shapes_of(config: SamConfig) -> tuple[str, ...]:
    """Return the draft shapes that the gate may choose from, in an engine that verifies trees."""
    if config.draft_shape == "chain" or why_chains(config):
        return ("chain",)
    return ("tree",) if config.draft_shape == "tree" else ("chain", "tree")


class DraftSession:
    """Makes the drafts for the requests of one engine.

    Args:
        config: validated settings, with `enabled` true.
        exchange: the channel to engines that run in lockstep with this engine, if there are any.
        record: whether to record steps and requests. If so, the caller has to call `drain`.

    Attributes:
        drafter: None after the drafter has failed.
        wants_drafts: whether the next step needs room for drafts or padding.

    Raises:
        ConfigError: a source cannot work with its settings.
    """

    def __init__(
        self,
        config: SamConfig,
        requests: Requests,
        limits: Limits,
        *,
        exchange: Exchange | None = None,
        record: bool = True,
        hooks: EngineHooks = NO_HOOKS,
    ) -> None:
        limits = limits._replace(k=config.max_draft_tokens)
        self._k = limits.k
        self._requests = requests
        self._record = record
        self._heard = hooks.heard
        shapes = shapes_of(config) if hooks.verifies_trees else ("chain",)
        self.gate = make_gate(config.gate, limits, exchange, len(shapes))
        self.drafter: SamDrafter | None = SamDrafter(config, limits, shapes)
        names = [source.name for source in self.drafter.sources]
        measures = config.gate.kind == "auto" and exchange is None
        price = ModelPrice(limits) if measures and {*names} > {"model"} else None
        self._made = MadeDrafts(config.sources.model, hooks, price)
        self._books = Bookkeeping(limits, names, record)
        self._batch = self.drafter.batch  # still used for padding after the drafter has failed
        self._padding = functools.partial(
            DraftPadding, setting=config.pad_drafts, graph_of=hooks.graph_of, limits=limits
        )
        self.failures = 0
        self.exchange_failures = 0
        self.wants_drafts = False
        self._paused = False
        self._request_ids: list[str] = []
        # For each draft shape, the requests of the batch that may not have such drafts.
        self._left_out: list[set[str]] = [set() for _ in shapes]
        # For each draft shape: int32[B], 1 for requests that may have such drafts, else 0. If all
        # requests may, the int 1 stands for the array.
        self._may_draft: list[int | np.ndarray] = [1] * len(shapes)
        self._shares = (1.0,) * len(shapes)  # by shape: share of requests that may draft it
        self._gate_open = False  # whether the gate was open when the last drafts were made
        self._may_open = False  # whether the gate's last decision lets the engine get drafts
        # What `settle` needs to finish a step: the step, whether it verified drafts, the budget,
        # and the time (ns) at which drafting ended.
        self._unsettled: tuple[EngineStep, bool, int, int] | None = None
        self._wasted = False  # whether the gate decided otherwise after the step got its drafts
        self._drained: Mapping[str, float] = {}  # counters at the last drain

    @property
    def wants_made(self) -> bool:
        """Whether the engine's draft model should draft for the next step."""
        return self._made.wanted

    @functools.cached_property
    def padding(self) -> DraftPadding:
        """The object that pads drafts; made on first use, after the engine captured its graphs."""
        try:
            return self._padding()
        except Exception:
            logger.warning(
                "The engine's graphs cannot be looked up, so no step is filled up.", exc_info=True
            )
            return self._padding(setting="never")

    def step(
        self,
        request_ids: list[str],
        token_ids: Int32Array,
        num_tokens: Int32Array,
        sampled: Int32Array,
        *,
        room: bool = True,
        whole: bool = False,
    ) -> DraftBatch:
        """Learn from the engine's last step, and draft for its next step.

        Args:
            request_ids: B request ids in row order. Pass a new list in each call, or the same list
                unchanged.
            token_ids: int32[R >= B, L], row i begins with the text of request i; not copied.
            num_tokens: int32[B], the number of known tokens of each request.
            sampled: int32[B], the number of tokens that each request gained in this step, bonus
                token included; 0 for a prompt that is still being computed. Pass a new array in
                each call, because the next call reads this call's array again.
            room: whether the engine's next step can verify drafts. If it cannot, the engine gets no
                drafts, and `wants_drafts` says whether later steps should have room for drafts.
            whole: whether a step that can verify drafts has exactly k draft tokens per request. If
                so, the gate's last decision applies, and the gate decides again in `settle`.

        Returns:
            The drafts with their padding. They are valid until the next call.
        """
        self.settle()
        if self.drafter is not None and not self._paused:
            try:
                return self._step(
                    self.drafter, request_ids, token_ids, num_tokens, sampled, room, whole
                )
            except Exception:
                self._switch_off()
        rows = len(sampled)
        self._batch.clear(rows)
        self._made.wanted = False
        self.wants_drafts = not self._paused and self.padding.applies(rows, gate_open=False)
        if room and (whole or self.wants_drafts):
            self.padding.fill_up(self._batch, token_ids, num_tokens, sampled > 0)
        return self._batch

    def _step(
        self,
        drafter: SamDrafter,
        request_ids: list[str],
        token_ids: Int32Array,
        num_tokens: Int32Array,
        sampled: Int32Array,
        room: bool,
        whole: bool,
    ) -> DraftBatch:
        started_ns = time.perf_counter_ns()
        same_batch = request_ids == self._request_ids
        if not same_batch:
            self._follow(drafter, request_ids)
        verified = drafter.observe(token_ids, num_tokens, sampled)
        if (heard := self._heard(self._gate_open)) is not None:
            drafter.hear(heard)
        if (made := self._made.take()) is not None:
            drafter.receive(*made)
        step = EngineStep(
            started_ns,
            verified,
            num_tokens,
            same_batch=same_batch,
            offered=drafter.offered(verified) if same_batch and self._gate_open else None,
            wasted=self._wasted,
            may_draft=self._shares,
        )
        drafted, filled = self._batch.pending, room and whole
        budget, least_chance = self._k * self._may_open, 0.0
        if not filled:
            budget = self._decide(step, drafted, whole=whole or self.padding.in_use, room=room)
            least_chance = self.gate.least_chance
        gate_open, shape = budget > 0, self.gate.shape
        self._gate_open = gate_open
        decoding = sampled > 0
        batch = drafter.draft(
            token_ids,
            num_tokens,
            decoding,
            budget * self._may_draft[shape] * decoding if gate_open else 0,
            gate_open=gate_open,
            least_chance=least_chance,
            shape=shape,
        )
        if filled or (room and self.padding.applies(len(sampled), gate_open)):
            self.padding.fill_up(batch, token_ids, num_tokens, decoding)
        if filled:
            self._unsettled = step, drafted, budget, time.perf_counter_ns()
        else:
            self._wasted = False
            drafter.settle()
            offered = decoding if hands_over(budget, least_chance) else None
            self._books.end(started_ns, offered, budget, branches=batch.has_trees)
        return batch

    def settle(self) -> None:
        """Finish the last step if `step` did not: record it, and let the gate learn from it."""
        if self._unsettled is None or self.drafter is None:
            return
        (step, drafted, budget, until_ns), self._unsettled = self._unsettled, None
        try:
            waited_ns = time.perf_counter_ns() - until_ns
            self.drafter.settle()
            self._decide(step, drafted, whole=True, room=True)
            self._wasted = not self.wants_drafts or (self._may_open and not budget)
            offered = step.verified.sampled > 0 if budget else None
            self._books.end(step.now_ns + waited_ns, offered, budget)
        except Exception:
            self._switch_off()

    def _decide(self, step: EngineStep, drafted: bool, *, whole: bool, room: bool) -> int:
        """Count a step's tokens; return the budget of the next step.

        If the next step has no room for drafts, the budget is 0. Only a look keeps its budget,
        because it hands no drafts over to the engine.
        """
        self._books.ledger.book(step.verified, drafted=drafted)
        was_open = self._may_open
        budget = self.gate.next_budget(step, whole=whole, room=room)
        drafts = self._may_open = hands_over(budget, self.gate.least_chance)
        looks = budget > 0 and not drafts
        if self._made.ask(step, was_open=was_open, is_open=drafts, looks=looks):
            budget = 0
        rows = len(step.num_tokens)
        self.wants_drafts = drafts or self.padding.applies(rows, gate_open=False)
        return budget if room or not drafts else 0

    def _follow(self, drafter: SamDrafter, request_ids: list[str]) -> None:
        """Register a changed batch, and free the state of requests that ended."""
        drafter.finish(self._books.ledger.follow(request_ids, live=self._requests.live))
        before = set(self._request_ids)
        if not self._record:  # then `drain` is not called
            self._books.ledger.drain()  # otherwise the ledger would keep totals of ended requests
            if before.isdisjoint(request_ids):  # this counts as the end of a training step
                drafter.end_step()
        joined = [request_id for request_id in request_ids if request_id not in before]
        if drafter.needs_identity:
            for request_id in joined:
                identity = self._requests.identity(request_id)
                if identity is not None:
                    drafter.admit(request_id, identity)
        drafter.bind(request_ids)
        for place, shape in enumerate(drafter.shapes):
            left_out = self._left_out[place].intersection(request_ids)
            left_out.update(one for one in joined if not self._requests.takes(one, shape))
            self._left_out[place] = left_out
            may_draft = [request_id not in left_out for request_id in request_ids]
            self._may_draft[place] = np.array(may_draft, np.int32) if left_out else 1
        self._shares = tuple(float(np.mean(one)) for one in self._may_draft)
        self._request_ids = list(request_ids)

    def exchange_texts(self, origin: str, pieces: Sequence[Any]) -> list[Piece]:
        """Exchange texts as in `Source.exchange`; if the exchange fails, its texts are lost."""
        if self.drafter is not None:
            try:
                return self.drafter.exchange(origin, pieces)
            except Exception:
                if not self.exchange_failures:
                    logger.warning(
                        "Texts could not be exchanged with other engines; drafting goes on. "
                        "Further failures are only counted (sam/draft/exchange_failures).",
                        exc_info=True,
                    )
                self.exchange_failures += 1
        return []

    def pause(self, paused: bool) -> None:
        """Begin or end a phase without drafts and records; called while no request runs."""
        self.settle()
        self._paused, self.wants_drafts = paused, False
        self._heard(False)

    def _switch_off(self) -> None:
        """Go on without the drafter, whose exception is being handled."""
        self.failures += 1
        self.drafter = None  # its state can no longer be trusted
        with contextlib.suppress(Exception):
            self._heard(False)
        logger.warning(
            "Drafting failed and is switched off; the rollout continues without drafts.",
            exc_info=True,
        )
        # Later changes of the batch are not noticed, so the totals of its requests end now.
        with contextlib.suppress(Exception):  # the ledger may be what failed
            self._books.ledger.follow([], live=())

    def drain(self, going_on: Iterable[RequestIdentity] = ()) -> dict[str, Any]:
        """End a training step; return and reset the record since the last call.

        Args:
            going_on: identities of the responses that have not ended, both running and interrupted.

        Returns:
            A mapping with the keys ``steps`` (the recorded steps as columns), ``clock_s`` (the time
            of this call on the clock of the steps' times), ``host`` (the machine of that clock),
            ``requests`` (the fields of ``RequestTotals``, by request id) and ``counters`` (by
            metric, without ``sam/``).
        """
        self.settle()
        totals: Mapping[str, float] = {}
        levels: Mapping[str, float] = {}
        if (drafter := self.drafter) is not None:
            try:
                # No call of `step` followed the end of the last requests, so their end is noticed
                # here.
                live = self._requests.live
                drafter.responses.interrupted = {one.key: one.group_key for one in going_on}
                self._follow(drafter, [one for one in self._request_ids if one in live])
                self._made.end_step()
                drafter.end_step()
                drafter.responses.interrupted = {}
                totals, levels = drafter.counters(), drafter.levels() | self.gate.drain()
            except Exception:
                self._switch_off()
        totals = {
            **totals,
            "draft/failures": self.failures,
            "draft/exchange_failures": self.exchange_failures,
        }
        since = {name: value - self._drained.get(name, 0) for name, value in totals.items()}
        self._drained = totals
        drained = self._books.drain()
        drained["counters"] |= {**since, **levels}
        return drained
