"""Defines the draft proposer that vLLM's model runner calls after every engine step.

vLLM's ``custom_class`` interface (vLLM >= 0.23) passes token ids, lengths and sampled tokens
of each row of the input batch. Ranks whose drafts vLLM ignores have no `DraftSession`.
"""

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import vllm

from sam_rollout.config import ConfigError
from sam_rollout.core.identity import OUTSIDE_TRAINING, TRAIN_SPLIT, RequestIdentity, identify
from sam_rollout.core.limits import Limits
from sam_rollout.integrations.vllm.ascend import from_ascend, hooks_of
from sam_rollout.integrations.vllm.drafting.scored_positions import ScoredPositions
from sam_rollout.integrations.vllm.engine_settings import WITHOUT_DRAFTS_KEY, settings_of
from sam_rollout.integrations.vllm.model_drafts.drafter_weights import read_again
from sam_rollout.integrations.vllm.model_drafts.engine_drafter import EngineDrafter
from sam_rollout.integrations.vllm.sampling.samplers import keeps_draws
from sam_rollout.integrations.vllm.scheduling.dp_exchange import (
    DpExchange,
    join_group,
    steps_in_lockstep,
)
from sam_rollout.integrations.vllm.scheduling.drafts_with_output import WithOutput
from sam_rollout.integrations.vllm.scheduling.late_binding import LateBinding
from sam_rollout.integrations.vllm.scheduling.scheduler_choice import (
    come_with_output,
    has_places,
    why_synchronous,
)
from sam_rollout.integrations.vllm.trees.attachment import NOT_YET, attach_trees, why_no_trees
from sam_rollout.integrations.vllm.trees.step_trees import TreeKeeper
from sam_rollout.session.adapter import EngineHooks
from sam_rollout.session.padding import NO_GRAPH, NO_PADDING
from sam_rollout.session.session import DraftSession, shapes_of, why_chains
from sam_rollout.sources import check_sources

logger = logging.getLogger(__name__)

# If a runner's `drafter` is vLLM's own, this attribute of the runner has our proposer.
PROPOSER_ATTRIBUTE = "sam_rollout_proposer"


def is_output_rank() -> bool:
    """Whether vLLM takes drafts from this rank: the first rank of the last pipeline stage."""
    from vllm.distributed import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank


class RunnerRequests:
    """Answers a session's questions about the requests of vLLM's model runner."""

    def __init__(self, runner: Any) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._runner = runner
        # With asynchronous scheduling, drafts come too late for a grammar. If thinking ends in the
        # middle of a step, the grammar misses the step's later tokens in vLLM 0.23 and 0.24.
        begins = hasattr(StructuredOutputManager, "_get_constraint_start")
        ahead = getattr(runner, "use_async_scheduling", False)
        self._no_grammars = ahead or not begins

    @property
    def live(self) -> Collection[str]:
        """Ids of live requests, including preempted and paused requests."""
        return self._runner.requests

    def identity(self, request_id: str) -> RequestIdentity:
        """Return a request's identity, or one made from its prompt if the request has none."""
        request = self._runner.requests[request_id]
        identity = RequestIdentity.from_extra_args(request.sampling_params.extra_args)
        if identity is not None:
            return identity
        prompt_ids = request.prompt_token_ids or []
        return identify(prompt_ids, seed=0, step=OUTSIDE_TRAINING, sibling=0, split=TRAIN_SPLIT)

    def takes(self, request_id: str, shape: str) -> bool:
        """Whether a request may have drafts of this shape (``"chain"`` or ``"tree"``)."""
        sampling = self._runner.requests[request_id].sampling_params
        if (sampling.extra_args or {}).get(WITHOUT_DRAFTS_KEY):
            return False
        if shape == "tree":  # each of these rules reads all draft tokens as one text
            ruled = (
                sampling.structured_outputs is not None
                or getattr(sampling, "thinking_token_budget", None) is not None
                or sampling.min_tokens > 0
                or bool(sampling.bad_words)
                or sampling.repetition_penalty != 1
                or sampling.presence_penalty != 0
                or sampling.frequency_penalty != 0
            )
            return not ruled
        return not self._no_grammars or sampling.structured_outputs is None


class SamProposer:
    """Our drafter for vLLM's ``custom_class`` interface.

    Raises:
        ConfigError: The configuration is not valid, ``sam.max_draft_tokens`` differs from the
            engine's ``num_speculative_tokens``, or a corpus has tokens that the model lacks.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.config = settings_of(vllm_config).sam
        self._vllm_config = vllm_config
        engine_k = vllm_config.speculative_config.num_speculative_tokens
        if engine_k != self.config.max_draft_tokens:
            raise ConfigError(
                "speculative_config.num_speculative_tokens",
                engine_k,
                f"must equal sam.max_draft_tokens = {self.config.max_draft_tokens}",
            )
        check_sources(self.config.sources, vllm_config.model_config.get_vocab_size())
        self._limits = Limits(
            max_rows=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            vocab_size=vllm_config.model_config.get_vocab_size(),
            max_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        )
        # All ranks must send tensors of the same shape, even ranks without a session.
        self.exchange: DpExchange | None = None
        if steps_in_lockstep(vllm_config):
            self.exchange = join_group(vllm_config.parallel_config)
        self.session: DraftSession | None = None
        self._runner: Any = None
        self._attached: list[Any] = []  # wrappers of the runner's methods
        self._late_binding: LateBinding | None = None
        self._with_output: WithOutput | None = None
        self._engine_drafter: EngineDrafter | None = None
        self._trees: TreeKeeper | None = None
        self._why_no_trees = ""

    def load_model(self, *_args: Any, **_kwargs: Any) -> None:
        """Do nothing; the runners for CPUs and NPUs call this method."""

    dummy_run = load_model  # vllm-ascend's runner calls this method, too

    def bind(self, model_runner: Any, *, drafts_are_used: bool, record: bool) -> None:
        """Begin a session for the requests of a runner; the new session replaces an earlier one.

        Args:
            drafts_are_used: False on ranks whose drafts vLLM never reads; no session begins there.
            record: Whether to keep per-step and per-request records. If so, the caller has to call
                ``drain``.

        Raises:
            ConfigError: A draft model would run with vLLM's own asynchronous scheduler.
        """
        late = getattr(model_runner, "use_async_scheduling", False)
        if late and self.config.drafts_with_model and not has_places(self._vllm_config):
            raise ConfigError(
                "scheduler_config.async_scheduling",
                True,
                "must be false with sam.sources.model where the package's entry points are not "
                "installed",
            )
        self._runner = model_runner
        while self._attached:
            self._attached.pop().detach()
        self._late_binding = self._with_output = self._engine_drafter = None
        self._bind_trees(model_runner)
        hooks = hooks_of(model_runner)
        if self.config.drafts_with_model:
            read_again(model_runner)
            model, passes = self.config.sources.model, self.config.sources.model.max_tokens
            if self.exchange is not None:
                # Engines that share experts must all run the same number of passes, even if idle.
                passes = self.config.max_draft_tokens
            kind = from_ascend("model_drafts:AscendEngineDrafter") if hooks else EngineDrafter
            self._engine_drafter = kind(
                model_runner,
                model,
                passes,
                self.exchange is None and self._vllm_config.parallel_config.world_size == 1,
                self._choose_drafts if drafts_are_used and not late else None,
                ahead=drafts_are_used and late,
            )
            self._attached.append(self._engine_drafter)
        self.session = self._new_session(record) if drafts_are_used else None
        if late:
            from vllm.distributed import get_tp_group

            group = get_tp_group()
            binding = LateBinding if hooks is None else hooks.AscendLateBinding
            self._late_binding = binding(
                model_runner,
                self.session,
                group if group.world_size > 1 else None,
                self._engine_drafter if drafts_are_used else None,
            )
            self._attached.append(self._late_binding)
        elif drafts_are_used and come_with_output(self._vllm_config):
            self._with_output = WithOutput(model_runner)
            self._attached.append(self._with_output)

    def _bind_trees(self, model_runner: Any) -> None:
        """Prepare the runner for trees; if it cannot verify trees, drafts are chains."""
        self._why_no_trees = ""
        self._trees = None
        if self.config.draft_shape == "chain":
            return
        self._why_no_trees = why_chains(self.config) or why_no_trees(
            model_runner, self._vllm_config, self.config
        )
        if not self._why_no_trees:
            self._trees, others = attach_trees(model_runner, self.config.drafts_with_model)
            self._attached += [self._trees, *others]
        elif self.config.draft_shape == "tree" and self._why_no_trees != NOT_YET:
            logger.warning("sam.draft_shape = chain: %s", self._why_no_trees)

    def _new_session(self, record: bool) -> DraftSession:
        hooks: dict[str, Any] = {"verifies_trees": self._trees is not None}
        likeliest = self.config.sources.recycling.enabled
        drawn = self.config.sources.draws.enabled and keeps_draws(self._runner)
        if likeliest or drawn:
            scored = ScoredPositions(
                self._runner, likeliest=likeliest, drawn=drawn, trees=self._trees
            )
            self._attached.append(scored)
            hooks["heard"] = scored.take
        if self._engine_drafter is not None:
            hooks["made"] = self._engine_drafter.take
            # With asynchronous scheduling, the draft model's drafts come two steps later.
            hooks["made_after"] = 3 if has_places(self._vllm_config) else 1
        sources: Any = self.config.sources
        if not drawn:  # the source `draws` needs a sampler that keeps drawn tokens
            sources = replace(sources, draws=replace(sources.draws, enabled=False))
        return DraftSession(
            replace(self.config, sources=sources),
            RunnerRequests(self._runner),
            self._limits,
            exchange=self.exchange,
            record=record,
            hooks=EngineHooks(graph_of=self._graph_of, **hooks),
        )

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,  # int32 [max_num_seqs], the texts' lengths
        token_ids_cpu: np.ndarray,  # int32 [max_num_seqs, max_model_len]
        **_ignored: Any,
    ) -> list[list[int]]:
        """Return up to k draft tokens for each row; an empty list where there is no draft."""
        rows = len(sampled_token_ids)
        if self._runner is None:
            raise RuntimeError(
                "SamProposer is not bound to the model runner: start vLLM with the worker "
                "extension sam_rollout.integrations.vllm.worker.SamWorkerExtension and call "
                "collective_rpc('sam_bind') before the first request"
            )
        if self._late_binding is not None:
            return []  # the sampled tokens are not on the host yet
        if self.session is None:
            return [[]] * rows
        # A row without sampled tokens is a chunk of an unfinished prompt.
        sampled = np.fromiter(map(len, sampled_token_ids), np.int32, rows)
        request_ids = self._runner.input_batch.req_ids
        batch = self.session.step(request_ids, token_ids_cpu, num_tokens_no_spec[:rows], sampled)
        if self._trees is not None:
            self._trees.keep(request_ids, batch)
        if self._with_output is None:
            return batch.to_lists()
        self._with_output.drafts = batch.to_lists() if batch.pending else []
        if self._engine_drafter is not None:
            wanted = self.session.wants_made or self._engine_drafter.is_probed
            self._with_output.wants_made = wanted or self.exchange is not None
        return []  # the step's output carries the drafts instead

    def _choose_drafts(self, sampled_token_ids: list[list[int]]) -> None:
        batch = self._runner.input_batch
        drafts = self.propose(sampled_token_ids, batch.num_tokens_no_spec, batch.token_ids_cpu)
        if self._with_output is None:  # vLLM reads drafts from these attributes
            self._runner._draft_token_ids = drafts
            self._runner._draft_token_req_ids = batch.req_ids.copy()

    def _graph_of(self, num_tokens: int, uniform: bool) -> str:
        """Return the mode (a name in `CUDAGraphMode`) of the graph that vLLM chooses for a step."""
        dispatcher = getattr(self._runner, "cudagraph_dispatcher", None)
        if dispatcher is None:
            return NO_GRAPH
        mode, _ = dispatcher.dispatch(num_tokens=num_tokens, uniform_decode=uniform)
        return mode.name

    def describe(self) -> dict[str, Any]:
        """Describe the running drafter for the start-up check."""
        why = ""
        if self._late_binding is None:
            why = why_synchronous(self._vllm_config, vllm.__version__) or "vLLM decided so"
        return {
            "proposer": f"{type(self).__module__}.{type(self).__qualname__}",
            "sam": self.config.to_mapping(),
            "draft_shapes": shapes_of(self.config) if self._trees else ("chain",),
            "why_no_trees": self._why_no_trees,
            "padding": self.session.padding.describe() if self.session else NO_PADDING,
            "deciding_engines": self.exchange.ranks if self.exchange else 1,
            "why_synchronous": why,
        }

    def probe(self, begin: bool) -> tuple[int, int] | None:
        if self._engine_drafter is None or self.session is None:
            return None
        return self._engine_drafter.probe(begin)

    def drain(self, going_on: Iterable[RequestIdentity] = ()) -> dict[str, Any] | None:
        """Return the record of ``DraftSession.drain``; None on ranks without a session."""
        if self.session is None:
            return None
        report = self.session.drain(going_on)
        if self._engine_drafter is not None:
            report["counters"] |= self._engine_drafter.take_counters()
        return report
