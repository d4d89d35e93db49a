"""Tries out our drafter and sampler in vLLM's second model runner (``vllm/v1/worker/gpu``).

The second runner keeps texts, lengths and drafts in arrays, in which a request has a fixed place,
its slot. docs/architecture.md lists what this code does not support.
"""

from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from sam_rollout.config import ConfigError, RolloutSamplerConfig
from sam_rollout.integrations.vllm.drafting.proposer import SamProposer
from sam_rollout.integrations.vllm.engine_settings import MODEL_RUNNER_ENV, settings_of
from sam_rollout.integrations.vllm.sampling.keyed_rows import KeyedRows
from sam_rollout.integrations.vllm.sampling.samplers import cut
from sam_rollout.integrations.vllm.scheduling.dp_exchange import steps_in_lockstep
from sam_rollout.verification import (
    NO_TOKEN,
    DraftLayout,
    draw_gumbel,
    keyed_bits,
    verify_coupled,
)

KEYED = "sam_rollout_sampling"  # attribute of the runner's sampler


class SamSpeculator(BaseSpeculator):
    """Takes the place of a draft model in the second runner.

    Raises:
        ConfigError: The settings are not valid, or ask for something that is not supported here:
            several ranks, engines that share experts, asynchronous scheduling, `recycling`.
    """

    supports_mm_inputs = False
    draft_logits = None  # all drafts are one-hot

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        ranks = vllm_config.parallel_config.world_size
        recycles = settings_of(vllm_config).sam.sources.recycling.enabled
        for found, value, reason in (
            (ranks > 1, ranks, "every rank would draft for itself"),
            (steps_in_lockstep(vllm_config), 1, "engines that share experts were not tried"),
            (vllm_config.scheduler_config.async_scheduling, 1, "drafts are not bound late"),
            (recycles, 1, "sam.sources.recycling was not tried"),
        ):
            if found:
                raise ConfigError(MODEL_RUNNER_ENV, value, f"{reason}; set it to 0")
        self.proposer = SamProposer(vllm_config)
        k = vllm_config.speculative_config.num_speculative_tokens
        rows = vllm_config.scheduler_config.max_num_seqs
        self._drafts = torch.zeros((rows, k), dtype=torch.int64, device=device)
        self._states: Any = None
        self._offered: DraftTokenIds | None = None

    def attach(self, runner: Any) -> None:
        self._states = runner.req_states
        runner.drafter = self.proposer
        runner.take_draft_token_ids = self._take_draft_token_ids

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        pass

    def capture(self) -> None:
        pass

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: Any,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,  # int32 [batch]; 0 for an unfinished prompt
        *_others: Any,
        dummy_run: bool = False,
        **_options: Any,
    ) -> torch.Tensor:
        drafts = self._drafts[: input_batch.num_reqs]
        if dummy_run:
            return drafts
        session = self.proposer.session
        if session is None:
            raise RuntimeError(
                "the drafter is not bound to the model runner: call collective_rpc('sam_bind') "
                "before the first request"
            )
        order = np.argsort(input_batch.idx_mapping_np)  # by slot, so every step has the same order
        slots = input_batch.idx_mapping_np[order]
        lengths = self._states.total_len.gpu.cpu().numpy()[slots]  # waits for the step's end
        sampled = num_sampled.cpu().numpy()[order]
        texts = self._states.all_token_ids.gpu[:, : lengths.max()].cpu().numpy()[slots]
        request_ids = [input_batch.req_ids[row] for row in order]
        batch = session.step(request_ids, texts, lengths, sampled)
        self._offered = DraftTokenIds(request_ids, batch.to_lists())
        tokens = np.empty(drafts.shape, np.int64)
        tokens[order] = batch.tokens[: len(order)]
        return drafts.copy_(torch.from_numpy(tokens))

    def _take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return the last step's drafts; vLLM's method would report k tokens for every request."""
        offered, self._offered = self._offered, None
        return offered


def attach(runner: Any) -> None:
    """Prepare vLLM's second runner for our drafter and sampler; safe to call repeatedly.

    The second runner forgets a request that is preempted, and keeps no sampling parameters. So we
    keep the data that the scheduler sends for each request, until the request ends.
    """
    if isinstance(runner.speculator, SamSpeculator):
        runner.speculator.attach(runner)
    if hasattr(runner, "requests"):
        return
    requests: dict[str, Any] = {}
    runner.requests = requests
    finish, add = runner.finish_requests, runner.add_requests

    def finish_requests(scheduler_output: Any) -> None:
        for request_id in scheduler_output.finished_req_ids:
            requests.pop(request_id, None)
        finish(scheduler_output)

    def add_requests(scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            requests.setdefault(request.req_id, request)
        add(scheduler_output)

    runner.finish_requests, runner.add_requests = finish_requests, add_requests


class KeyedSampling:
    """Draws and verifies tokens with random bits that depend on request and position."""

    kind = "coupled"

    def __init__(self, runner: Any) -> None:
        self._rows = KeyedRows(runner)
        self._sampler = runner.sampler
        self._states = runner.req_states
        add = runner.add_requests

        def add_requests(scheduler_output: Any) -> None:
            add(scheduler_output)
            names = [request.req_id for request in scheduler_output.scheduled_new_reqs]
            if names:
                self._set_keys(names)

        runner.add_requests = add_requests
        runner.sampler._sample_random = self._draw_cut
        if runner.rejection_sampler is not None:
            self._max_drafts = runner.rejection_sampler.num_speculative_steps
            runner.rejection_sampler._verify = self._verify

    def _set_keys(self, names: list[str]) -> None:
        slots = [self._states.req_id_to_index[name] for name in names]
        keys = self._rows.keys
        keys[torch.tensor(slots, device=keys.device)] = torch.tensor(
            self._rows.keys_of(names), device=keys.device
        )

    def _draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draw a token for each row, int64 [rows].

        ``slots`` has each row's slot. ``positions`` has the position before each drawn token.
        """
        bits = keyed_bits(self._rows.keys[slots], positions + 1)
        tokens = draw_gumbel(logits.to(torch.float32), bits)
        greedy = self._sampler.sampling_states.temperature.gpu[slots] == 0
        return torch.where(greedy, logits.argmax(dim=-1), tokens)

    def _draw_cut(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        _slots_np: Any,
        positions: torch.Tensor,
        top_k: torch.Tensor | None,
        top_p: torch.Tensor | None,
        *_others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = cut(logits, top_k, top_p)
        return self._draw(logits, slots, positions), logits

    def _verify(
        self,
        logits: torch.Tensor,  # [rows, vocabulary]
        _draft_logits: Any,
        input_ids: torch.Tensor,  # int [rows], each request's last token, then its draft tokens
        positions: torch.Tensor,  # int [rows]
        cu_num_rows: torch.Tensor,  # int [batch + 1]
        slots_of_requests: torch.Tensor,  # int [batch]
        slots_of_requests_np: np.ndarray,
        slots: torch.Tensor,  # int [rows]
        places: torch.Tensor,  # int [rows], each row's index among its request's rows
        *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return processed logits, tokens [batch, k + 1] and token counts."""
        logits = self._sampler.apply_sampling_params(
            logits, slots, slots_of_requests, slots_of_requests_np, positions, input_ids, places,
            others[0],
        )  # fmt: skip
        # `others[1]`, if given, has the input ids. Draft tokens that a grammar forbids are left out
        # there.
        verified = others[1] if len(others) > 1 else input_ids
        batch = len(slots_of_requests)
        ends = cu_num_rows[1:] - torch.arange(1, batch + 1, device=cu_num_rows.device)
        layout = DraftLayout(ends, len(logits) - batch, self._max_drafts)
        # A request has a row for its last token before the rows of its draft tokens.
        requests = torch.arange(batch, device=ends.device)
        request = requests.repeat_interleave(layout.counts, output_size=layout.num_drafts)
        drafts = verified[torch.arange(layout.num_drafts, device=ends.device) + request + 1]
        tokens = verify_coupled(layout, drafts, self._draw(logits, slots, positions))
        gained = (tokens != NO_TOKEN).sum(dim=1, dtype=torch.int32)
        return logits, tokens.to(torch.int64), gained


def installed_sampler(runner: Any) -> str:
    """Return the ``rollout_sampler.kind`` that is really installed, for the start-up check."""
    return KeyedSampling.kind if hasattr(runner.sampler, KEYED) else "stock"


def install_sampler(runner: Any, config: RolloutSamplerConfig) -> None:
    """Install a sampler that draws like the first runner's coupled sampler.

    Raises:
        ConfigError: The configured sampler is not ``coupled``.
    """
    if config.kind != KeyedSampling.kind:
        raise ConfigError(
            "rollout_sampler.kind",
            config.kind,
            f"not in vLLM's second runner; set {MODEL_RUNNER_ENV}=0",
        )
    if not hasattr(runner.sampler, KEYED):
        setattr(runner.sampler, KEYED, KeyedSampling(runner))
