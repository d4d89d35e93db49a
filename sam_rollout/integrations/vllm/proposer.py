"""The draft proposer that vLLM's model runner calls after every engine step.

vLLM's ``custom_class`` interface (vLLM >= 0.23) hands over rows of the input batch: token ids,
lengths and what was just sampled. Rows are reordered and reused from step to step, so the proposer
is bound to the model runner once (``bind``) and from then on knows requests by their id.

Three promises hold here. A drafter that fails never ends a rollout: it is switched off, named once
in the log and counted; notes on engine steps that fail end alone. While the gate is closed the
drafter only catches up. And ranks whose drafts vLLM ignores keep no state at all.

Where steps have to keep the shape of a captured graph, drafts are filled up last (``padding.py``).
"""

from __future__ import annotations

import contextlib
import logging
import platform
import time
from typing import Any

import numpy as np

from sam_rollout.config import ConfigError
from sam_rollout.drafting import SamDrafter, make_static_sources
from sam_rollout.gating import EngineStep, make_gate
from sam_rollout.identity import OUTSIDE_TRAINING, TRAIN_SPLIT, RequestIdentity, identify
from sam_rollout.integrations.vllm.corpus_check import check_corpus_fits
from sam_rollout.integrations.vllm.dp_exchange import DpExchange, join_group
from sam_rollout.integrations.vllm.ledger import RequestLedger
from sam_rollout.integrations.vllm.padding import DraftPadding, padding_by_rows
from sam_rollout.integrations.vllm.sampler_clock import SamplerClock
from sam_rollout.integrations.vllm.settings import sam_config_of
from sam_rollout.integrations.vllm.step_log import StepLog
from sam_rollout.telemetry.control import EXTRA_ARGS_KEY as CONTROL_KEY

logger = logging.getLogger(__name__)


def is_output_rank() -> bool:
    """Whether vLLM takes drafts from this process: the first rank of the last pipeline stage."""
    from vllm.distributed import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank


def steps_in_lockstep(vllm_config: Any) -> bool:
    """Whether other engines wait for each step of this one: experts spread over data parallelism.

    Engines of a dense model share nothing; vLLM runs them apart.
    """
    parallel = getattr(vllm_config, "parallel_config", None)
    if parallel is None or parallel.data_parallel_size == 1:
        return False
    return parallel.enable_expert_parallel or bool(vllm_config.model_config.is_moe)


class SamProposer:
    """Suffix-automaton drafts behind vLLM's ``custom_class`` interface.

    Args:
        vllm_config: The engine's configuration, with ours in ``additional_config``.

    Raises:
        ConfigError: The configuration is not valid, k differs from the engine's
            ``num_speculative_tokens``, or the corpus is not the model's.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.config = sam_config_of(vllm_config)
        engine_k = vllm_config.speculative_config.num_speculative_tokens
        if engine_k != self.config.max_draft_tokens:
            raise ConfigError(
                "speculative_config.num_speculative_tokens",
                engine_k,
                f"must equal sam.max_draft_tokens = {self.config.max_draft_tokens}",
            )
        self.max_rows = vllm_config.scheduler_config.max_num_seqs
        self.max_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        # On every rank, whether its drafts are used or not: all of a group send the same tensors.
        self.exchange: DpExchange | None = None
        if steps_in_lockstep(vllm_config):
            self.exchange = join_group(vllm_config.parallel_config)
        self.gate = make_gate(
            self.config.gate,
            max_rows=self.max_rows,
            max_draft_tokens=self.config.max_draft_tokens,
            exchange=self.exchange,
        )
        check_corpus_fits(self.config, vllm_config.model_config)
        self.drafter: SamDrafter | None = SamDrafter(
            self.config,
            self.max_rows,
            self.max_model_len,
            make_static_sources(self.config, self.max_rows, self.max_model_len),
        )
        self.ledger = RequestLedger(self.max_rows)
        self.failures = 0
        self.record_failures = 0
        self._runner: Any = None
        self._padding: DraftPadding | None = None
        self._drafts_are_used = True
        self._record = False
        self._request_ids: list[str] = []
        self._control: set[str] = set()  # requests of the batch that get no drafts
        # Rows that may draft: 1 for all, or int32 [batch], 0 for control requests.
        self._may_draft: int | np.ndarray = 1
        self._sampler_clock: SamplerClock | None = None
        self._booking_ns = 0  # spent on the ledger in the step under way
        self._steps = StepLog(self.drafter.source_names)

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """There is no draft model; the runners for CPU and NPU call this unconditionally."""

    def dummy_run(self, *_args: Any, **_kwargs: Any) -> None:
        """There is nothing to warm up or capture; the runner for NPU calls this unconditionally."""

    def bind(self, model_runner: Any, *, drafts_are_used: bool, record: bool) -> None:
        """Give access to request ids.

        Args:
            model_runner: The runner that owns this proposer.
            drafts_are_used: False on tensor-parallel ranks whose drafts vLLM never reads (it
                takes them from the output rank only); such a rank neither drafts nor keeps state.
            record: Keep per-step and per-request records; someone must then call ``drain``.
        """
        self._runner = model_runner
        self._padding = None  # the graphs it depends on are that runner's
        self._drafts_are_used = drafts_are_used
        self._record = record
        if self._sampler_clock is not None:
            self._sampler_clock.detach()
        self._sampler_clock = SamplerClock(model_runner) if record else None

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,  # int32 [max_num_seqs], sampled tokens included
        token_ids_cpu: np.ndarray,  # int32 [max_num_seqs, max_model_len]
        slot_mappings: Any = None,
        **_ignored: Any,
    ) -> list[list[int]]:
        """Return up to k draft tokens for each row; an empty list where there is no draft."""
        rows = len(sampled_token_ids)
        if not self._drafts_are_used:
            return [[]] * rows
        if self._runner is None:
            raise RuntimeError(
                "SamProposer is not bound to the model runner: start vLLM with the worker "
                "extension sam_rollout.integrations.vllm.worker.SamWorkerExtension and call "
                "collective_rpc('sam_bind') before the first request"
            )
        num_tokens = num_tokens_no_spec[:rows]
        if self.drafter is not None:
            try:
                return self._propose(sampled_token_ids, num_tokens, token_ids_cpu)
            except Exception:
                self._switch_off()
        return self._propose_nothing(sampled_token_ids, num_tokens, token_ids_cpu)

    def _propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens: np.ndarray,  # int32 [batch]
        token_ids_cpu: np.ndarray,
    ) -> list[list[int]]:
        started_ns = time.perf_counter_ns()
        rows = len(sampled_token_ids)
        request_ids = self._runner.input_batch.req_ids
        same_batch = request_ids == self._request_ids
        if not same_batch:
            self._follow_batch(request_ids)
        # A row without sampled tokens is a prompt chunk: its text is not complete yet.
        sampled = np.fromiter(map(len, sampled_token_ids), np.int32, rows)
        decoding = sampled > 0
        booking_ns = time.perf_counter_ns()
        verified_padding = self.ledger.observe(sampled, num_tokens)
        self._booking_ns += time.perf_counter_ns() - booking_ns
        k = self.gate.next_budget(
            EngineStep(
                started_ns,
                sampled,
                *self.ledger.in_flight(rows),
                num_tokens,
                same_batch=same_batch,
                may_draft=self._may_draft,
            ),
            whole=self.padding.in_use,
        )
        gate_open = k > 0
        batch = self.drafter.step(
            request_ids,
            token_ids_cpu,
            num_tokens,
            decoding,
            k * self._may_draft,
            gate_open=gate_open,
        )
        filling: np.ndarray | int = 0
        padded = self.padding.applies(rows, gate_open)
        if padded:
            drafts, filling = self.padding.fill_up(
                batch.tokens, batch.counts, token_ids_cpu, num_tokens, decoding
            )
        else:
            drafts = batch.to_lists() if gate_open else [[]] * rows
        logging_ns = time.perf_counter_ns()
        if gate_open or padded:
            self.ledger.expect(batch.counts, filling, gate_open & decoding)
        else:
            self.ledger.expect_nothing()
        if self._record and not self.record_failures:
            try:
                self._steps.add(
                    started_ns,
                    logging_ns - self._booking_ns,
                    gate_open,
                    k,
                    verified_padding,
                    self.drafter.verified_by_source,
                    self._sampler_clock.take_us(),
                )
            except Exception:
                self._stop_recording()
        self._booking_ns = 0
        return drafts

    def _propose_nothing(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens: np.ndarray,  # int32 [batch]
        token_ids_cpu: np.ndarray,
    ) -> list[list[int]]:
        """Go on without a drafter; steps still keep the shape that their graphs need."""
        rows = len(sampled_token_ids)
        if not self.padding.applies(rows, gate_open=False):
            return [[]] * rows
        nothing = np.zeros((rows, self.config.max_draft_tokens), np.int32)
        decoding = np.fromiter(map(bool, sampled_token_ids), bool, rows)
        drafts, _ = self.padding.fill_up(
            nothing, nothing[:, 0], token_ids_cpu, num_tokens, decoding
        )
        return drafts

    @property
    def padding(self) -> DraftPadding:
        """How steps are filled up; settled when first asked for, after graphs were captured."""
        if self._padding is None:
            k = self.config.max_draft_tokens
            by_rows = padding_by_rows(
                self.config.pad_drafts,
                getattr(self._runner, "cudagraph_dispatcher", None),
                k,
                self.max_rows,
                self.max_batched_tokens,
            )
            self._padding = DraftPadding(by_rows, k, self.max_model_len)
        return self._padding

    def _follow_batch(self, request_ids: list[str]) -> None:
        """Take over a changed batch and free what belonged to requests that ended."""
        # Preempted and paused requests leave the batch but stay in runner.requests.
        started_ns = time.perf_counter_ns()
        ended = self.ledger.follow(request_ids, live=self._runner.requests)
        self._booking_ns += time.perf_counter_ns() - started_ns
        self.drafter.finish(ended)
        before = set(self._request_ids)
        joined = [request_id for request_id in request_ids if request_id not in before]
        self._introduce(joined)
        self._control = {
            *self._control.intersection(request_ids),
            *filter(self._is_control, joined),
        }
        self._may_draft = self._mask(request_ids)
        if not self._record:
            self.ledger.drain()  # nobody will: keep the books of ended requests from piling up
            if set(self._request_ids).isdisjoint(request_ids):
                self.drafter.end_step()  # nobody says when a step ends: its whole batch has gone
        self._request_ids = list(request_ids)

    def _introduce(self, joined: list[str]) -> None:
        """Tell the drafter who joined the batch, where a source asks for that."""
        sources = self.config.sources
        if not (sources.siblings.enabled or sources.history.enabled):
            return
        for request_id in joined:
            identity = _identity_of(self._runner.requests[request_id])
            self.drafter.admit(request_id, identity)

    def _is_control(self, request_id: str) -> bool:
        """Whether a request asks to be sampled without drafts."""
        sampling = getattr(self._runner.requests.get(request_id), "sampling_params", None)
        return bool(sampling and (sampling.extra_args or {}).get(CONTROL_KEY))

    def _mask(self, request_ids: list[str]) -> int | np.ndarray:
        """Which rows of a changed batch may draft; one number where all are alike."""
        if not self._control:
            return 1
        return np.array([rid not in self._control for rid in request_ids], np.int32)

    def _end_step(self) -> None:
        """A training step has ended, its last requests too: an empty batch asks for no drafts."""
        if self._record and self._drafts_are_used and self._runner is not None:
            known = self._runner.requests
            self._follow_batch([one for one in self._runner.input_batch.req_ids if one in known])
            self._booking_ns = 0  # part of no engine step
        self.drafter.end_step()

    def _switch_off(self) -> None:
        """Go on without a drafter; called while its exception is handled."""
        self.failures += 1
        self.drafter = None  # whatever state it is in, nobody will trust it again
        logger.warning(
            "The drafter failed and is switched off; the rollout continues without drafts.",
            exc_info=True,
        )
        # Nobody follows the batch from now on: its totals are told once.
        with contextlib.suppress(Exception):  # the books may be what failed
            self.ledger.follow([], live=())

    def _stop_recording(self) -> None:
        """Draft on without notes of engine steps; called while the exception is handled.

        The ledger is kept: from it the gate knows what is in flight, and the drafter who has ended.
        """
        self.record_failures += 1
        self._steps = StepLog(self.drafter.source_names)  # no half of a note is handed over
        logger.warning(
            "Engine steps cannot be recorded any more and count as without drafts; drafting goes "
            "on.",
            exc_info=True,
        )

    def describe(self) -> dict[str, Any]:
        """Name what is really running, for the start-up check."""
        return {
            "proposer": f"{type(self).__module__}.{type(self).__qualname__}",
            "sam": self.config.to_mapping(),
            "bound": self._runner is not None,
            "drafts_are_used": self._drafts_are_used,
            "padding": self.padding.describe(),
            "deciding_engines": self.exchange.ranks if self.exchange else 1,
        }

    def drain(self) -> dict[str, Any]:
        """Hand over and reset what was recorded since the last call; a training step has ended.

        Returns:
            ``steps``: the columns of ``StepLog.drain``; ``clock_s`` and ``host``: the clock of
            their times now, and whose it is; ``requests``: per request id ``(verify_steps,
            drafted_tokens, accepted_tokens)``, filling left out; ``open``: per request id
            ``(steps, tokens)`` while the gate was open; ``counters``: the drafter's.
        """
        counters = {}
        if self.drafter is not None:
            try:
                self._end_step()
                counters = self.drafter.snapshot().to_mapping()
            except Exception:
                self._switch_off()
        counters |= self.ledger.counters()
        if self.padding.in_use:
            counters["padding_tokens"] = self.ledger.padding_tokens
            counters["accepted_padding_tokens"] = self.ledger.accepted_padding_tokens
        totals = self.ledger.drain()
        return {
            "steps": self._steps.drain(),
            "clock_s": time.monotonic(),
            "host": platform.node(),
            "requests": {request_id: tuple(one[:3]) for request_id, one in totals.items()},
            "open": {request_id: tuple(one[3:]) for request_id, one in totals.items()},
            "counters": {
                **counters,
                **self.gate.counters(),
                "failures": self.failures,
                "record_failures": self.record_failures,
            },
        }


def _identity_of(request: Any) -> RequestIdentity:
    """The identity a request carries or, in plain vLLM use, the one its prompt gives it."""
    identity = RequestIdentity.from_extra_args(request.sampling_params.extra_args)
    if identity is not None:
        return identity
    prompt_ids = request.prompt_token_ids or []
    return identify(prompt_ids, seed=0, step=OUTSIDE_TRAINING, sibling=0, split=TRAIN_SPLIT)
