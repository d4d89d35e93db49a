"""Runs our samplers inside vLLM, in steps without drafts and in verify steps.

With the coupled samplers, a response depends only on its key and its logits, and not on drafts.
vLLM's own code applies penalties, top-k and top-p. In an engine with drafts, vLLM refuses min-p,
logit biases and custom logits processors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from sam_rollout.config import ConfigError, RolloutSamplerConfig
from sam_rollout.integrations.vllm.sampling.keyed_rows import KeyedRows
from sam_rollout.integrations.vllm.trees.step_trees import TreeKeeper
from sam_rollout.verification import (
    NO_TOKEN,
    DraftLayout,
    draw_gumbel,
    draw_tokens,
    verify_coupled,
    verify_vectorised,
)
from sam_rollout.verification.trees import verify_tree

ACCEPT_STREAM = 1  # stream of random bits for accepting draft tokens; stream 0 draws tokens
GREEDY_TEMPERATURE = 0.0
# Number of a draft model's rows that are converted to float32 together. vLLM reserved no memory for
# a float32 copy of all of them.
DRAFT_ROWS_AT_ONCE = 128


def _invert(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return draw_tokens(logits.softmax(dim=-1, dtype=torch.float32), bits)


# Kind of sampler -> function that draws a token for each row. Its arguments are logits, float32
# [rows, vocabulary], and random bits, int64 [rows].
DRAW = {"vectorised": _invert, "coupled": draw_gumbel, "coupled_inversion": _invert}


def shared_noise(model_runner: Any) -> KeyedTopKTopPSampler | None:
    """Return the runner's sampler if a draft model can draw with the sampler's noise, else None."""
    drawing = getattr(getattr(model_runner, "sampler", None), "topk_topp_sampler", None)
    shares = isinstance(drawing, KeyedTopKTopPSampler) and drawing.config.kind == "coupled"
    return drawing if shares else None


def keeps_draws(model_runner: Any) -> bool:
    """Whether the runner's verify steps keep the token that every row drew (`row_tokens`)."""
    verifying = getattr(model_runner, "rejection_sampler", None)
    return isinstance(verifying, KeyedRejectionSampler) and verifying.config.is_coupled


def installed_sampler(model_runner: Any) -> str:
    """Return the ``rollout_sampler.kind`` that is really installed, for the start-up check."""
    sampler = getattr(model_runner, "sampler", None)
    drawing = getattr(sampler, "topk_topp_sampler", None)
    if not isinstance(drawing, KeyedTopKTopPSampler):
        return "stock"
    verifying = getattr(model_runner, "rejection_sampler", None)
    if verifying is not None and not isinstance(verifying, KeyedRejectionSampler):
        return f"{drawing.config.kind} for steps without drafts only"
    return drawing.config.kind


def cut(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
    """Apply top-k and top-p like vLLM, but on GPUs never by sorting.

    With up to 7 rows, vLLM 0.23 and 0.24 sort the logits; with more rows, they search for the
    threshold. Sorting and searching may keep different tokens. vLLM 0.31 always searches, but with
    more than 64 rows it searches by another method.

    ``logits``, float32 [rows, vocabulary], may be overwritten. Excluded tokens get minus infinity.
    """
    search = getattr(topk_topp_sampler, "apply_top_k_top_p_triton", None)
    if search is None or logits.device.type != "cuda" or (k is None and p is None):
        return topk_topp_sampler.apply_top_k_top_p(logits, k, p)
    return search(logits, k, p)


class KeyedTopKTopPSampler(TopKTopPSampler):
    """Draws the tokens of steps without drafts, with keyed random numbers."""

    _cut = staticmethod(cut)

    def __init__(self, logprobs_mode: str, rows: KeyedRows, config: RolloutSamplerConfig) -> None:
        super().__init__(logprobs_mode)
        self.config = config
        self._rows = rows
        self.forward = self._draw  # the parent class chooses a method per platform

    def _draw(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draw tokens; return them, and processed logits or log-probabilities if asked for."""
        logits = self._cut(logits, k, p)
        bits = self._rows.decode_bits(logits.shape[0])
        tokens = DRAW[self.config.kind](logits.to(torch.float32), bits)
        returned = None
        if self.logprobs_mode == "processed_logits":
            returned = logits
        elif self.logprobs_mode == "processed_logprobs":
            returned = logits.log_softmax(dim=-1, dtype=torch.float32)
        return tokens, returned

    def draw_drafts(
        self, logits: torch.Tensor, sampling: SamplingMetadata, positions: torch.Tensor
    ) -> torch.Tensor:
        """Draw draft tokens from a draft model's logits, each with the noise of its position.

        Greedy requests get the likeliest tokens. Penalties are not applied. ``logits`` is
        [requests, vocabulary]. ``positions``, int64 [requests], has each draft token's position in
        its text.
        """
        if sampling.all_greedy:
            return logits.argmax(dim=-1)
        greedy = sampling.temperature == GREEDY_TEMPERATURE
        temperature = sampling.temperature.masked_fill(greedy, 1.0).unsqueeze(1)
        bits = self._rows.draft_bits(positions)
        drawn = []
        for first in range(0, len(logits), DRAFT_ROWS_AT_ONCE):
            rows = slice(first, first + DRAFT_ROWS_AT_ONCE)
            part = logits[rows].to(torch.float32, copy=True).div_(temperature[rows])
            limits = (
                None if one is None else one[rows] for one in (sampling.top_k, sampling.top_p)
            )
            drawn.append(DRAW[self.config.kind](self._cut(part, *limits).float(), bits[rows]))
        tokens = torch.cat(drawn)
        return tokens if sampling.all_random else torch.where(greedy, logits.argmax(-1), tokens)


class VerifyStep(NamedTuple):
    """A step whose drafts are verified."""

    metadata: SpecDecodeMetadata
    sampling: SamplingMetadata
    layout: DraftLayout


class KeyedRejectionSampler(RejectionSampler):
    """Verifies drafts with keyed random numbers.

    Raises:
        ConfigError: The engine asks for a synthetic acceptance rate.
    """

    _cut = staticmethod(cut)
    _scratch: torch.Tensor | None = None
    # int64 [rows], tokens that the last verify step drew; None unless `config.is_coupled`.
    row_tokens: torch.Tensor | None = None
    trees: TreeKeeper | None = None  # None: all drafts are chains
    # int64 [batch, max_drafts + 1], nodes of the last verify step's paths; None without trees.
    path: torch.Tensor | None = None

    def __init__(
        self,
        sampler: Any,
        spec_config: Any,
        device: torch.device,
        rows: KeyedRows,
        config: RolloutSamplerConfig,
    ) -> None:
        super().__init__(sampler, spec_config, device)
        if self.synthetic_mode:
            raise ConfigError(
                "speculative_config.rejection_sample_method",
                "synthetic",
                f"not with rollout_sampler.kind = {config.kind!r}; use 'stock'",
            )
        self.config = config
        self._rows = rows

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Verify one step's drafts; arguments and result are the same as in vLLM's method.

        ``logits``, [num_drafts + batch, vocabulary], may be overwritten.

        Raises:
            ConfigError: Rejection sampling would have to know the distributions of sampled drafts.
        """
        if draft_probs is not None and not self.config.is_coupled:
            raise ConfigError(
                "speculative_config.draft_sample_method",
                "probabilistic",
                f"not with rollout_sampler.kind = {self.config.kind!r}; use 'coupled' or 'stock'",
            )
        layout = DraftLayout(
            metadata.cu_num_draft_tokens, len(metadata.draft_token_ids), metadata.max_spec_len
        )
        step = VerifyStep(metadata, sampling_metadata, layout)
        raw = logits.to(torch.float32)
        wants_logprobs = sampling_metadata.max_num_logprobs is not None
        keep_raw = wants_logprobs and not self.is_processed_logprobs_mode
        processed = self._process(raw.clone() if keep_raw else raw, step)
        token_ids, row_tokens = self._verify(processed, step)
        self.row_tokens = row_tokens if self.config.is_coupled else None
        logprobs = None
        if wants_logprobs:
            source = raw if keep_raw else processed
            if not self.is_logits_logprobs_mode:
                source = self.sampler.compute_logprobs(source)
            logprobs = self._gather(source, sampling_metadata.max_num_logprobs, row_tokens, layout)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=logprobs)

    def _verify(self, logits: torch.Tensor, step: VerifyStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens by request, int32 [batch, max_drafts + 1], and by row, int64 [rows]."""
        metadata, sampling, layout = step
        drafts = metadata.draft_token_ids
        if sampling.all_greedy:
            row_tokens = logits.argmax(dim=-1)
            return self._keep(layout, drafts, row_tokens), row_tokens
        greedy = None if sampling.all_random else sampling.temperature == GREEDY_TEMPERATURE
        bits = self._rows.verify_bits(metadata.logits_indices, layout.request_of_row)
        if self.config.is_coupled:
            row_tokens = DRAW[self.config.kind](logits, bits)
            if greedy is not None:
                likeliest = logits.argmax(dim=-1)
                row_tokens = torch.where(greedy[layout.request_of_row], likeliest, row_tokens)
            return self._keep(layout, drafts, row_tokens), row_tokens
        probabilities = logits.softmax(dim=-1, dtype=torch.float32)
        accept_bits = self._rows.verify_bits(
            metadata.logits_indices, layout.request_of_row, ACCEPT_STREAM
        )
        token_ids = verify_vectorised(
            layout,
            drafts,
            probabilities,
            accept_bits,
            bits,
            greedy=greedy,
            scratch=self._scratch_for(layout.batch, probabilities),
        )
        place = torch.arange(layout.num_rows, device=logits.device)
        place = place - layout.first_row[layout.request_of_row]
        row_tokens = token_ids[layout.request_of_row, place].to(torch.int64)
        return token_ids, row_tokens.masked_fill(row_tokens == NO_TOKEN, 0)

    def _keep(
        self, layout: DraftLayout, drafts: torch.Tensor, row_tokens: torch.Tensor
    ) -> torch.Tensor:
        trees = None if self.trees is None else self.trees.step
        if self.trees is None or trees is None:
            self.path = None
            return verify_coupled(layout, drafts, row_tokens)
        token_ids, self.path = verify_tree(layout, drafts, row_tokens, trees.shapes)
        self.trees.accept(trees, self.path, token_ids)
        return token_ids

    def _scratch_for(self, batch: int, probabilities: torch.Tensor) -> torch.Tensor:
        if self._scratch is None or len(self._scratch) < batch:
            self._scratch = probabilities.new_empty(batch, probabilities.shape[1])
        return self._scratch

    def _gather(
        self,
        logprobs: torch.Tensor,  # [rows, vocabulary]
        count: int,
        row_tokens: torch.Tensor,  # int64 [rows]
        layout: DraftLayout,
    ) -> LogprobsTensors:
        """Gather log-probabilities and ranks, one row for each token of [batch, max_drafts + 1]."""
        gathered = self.sampler.gather_logprobs(logprobs, count, row_tokens)
        rows = layout.rows  # the row that each token was drawn from
        if self.path is not None:
            rows = (layout.first_row.unsqueeze(1) + self.path).clamp_(max=layout.num_rows - 1)
        rows = rows.flatten()
        return LogprobsTensors(
            gathered.logprob_token_ids[rows],
            gathered.logprobs[rows],
            gathered.selected_token_ranks[rows],
        )

    def _process(self, logits: torch.Tensor, step: VerifyStep) -> torch.Tensor:
        """Apply all sampling parameters to logits, float32 [rows, vocabulary], in place."""
        metadata, sampling, layout = step
        if _changes_logits(sampling):
            sampling, min_tokens = _without_min_tokens(sampling)
            draft_rows, bonus_rows = metadata.target_logits_indices, metadata.bonus_logits_indices
            bonus = self.sampler.apply_logits_processors(logits[bonus_rows], sampling, True)
            drafts = self.apply_logits_processors(logits[draft_rows], sampling, metadata)
            logits[bonus_rows] = bonus
            logits[draft_rows] = drafts
            if min_tokens is not None:
                # vLLM's method for bonus tokens would not count the draft tokens before them.
                places = [count + 1 for count in metadata.num_draft_tokens]
                logits = min_tokens.apply_with_spec_decode(logits, places)
        if sampling.all_greedy:
            return logits
        requests = layout.request_of_row
        temperature = sampling.temperature
        if not sampling.all_random:
            temperature = temperature.masked_fill(temperature == GREEDY_TEMPERATURE, 1.0)
        logits.div_(temperature[requests].unsqueeze(1))
        top_k = None if sampling.top_k is None else sampling.top_k[requests]
        top_p = None if sampling.top_p is None else sampling.top_p[requests]
        return self._cut(logits, top_k, top_p)


def _without_min_tokens(
    sampling: SamplingMetadata,
) -> tuple[SamplingMetadata, MinTokensLogitsProcessor | None]:
    rules = list(sampling.logitsprocs.all)
    found = next((rule for rule in rules if isinstance(rule, MinTokensLogitsProcessor)), None)
    others = LogitsProcessors([rule for rule in rules if rule is not found])
    return replace(sampling, logitsprocs=others), found


def _changes_logits(sampling: SamplingMetadata) -> bool:
    """Whether a parameter other than temperature, top-k or top-p may change this batch's logits."""
    budget = getattr(sampling, "thinking_budget_state_holder", None)
    return (
        not sampling.no_penalties
        or bool(sampling.bad_words_token_ids)
        or sampling.allowed_token_ids_mask is not None
        or any(map(is_active, sampling.logitsprocs.non_argmax_invariant))
        or (budget is not None and budget.has_tracked_requests())
    )


def is_active(processor: Any) -> bool:
    """Whether one of vLLM's logits processors may change logits of this batch."""
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    return True


def install_sampler(
    model_runner: Any,
    config: RolloutSamplerConfig,
    drawing: type[KeyedTopKTopPSampler] = KeyedTopKTopPSampler,
    verifying: type[KeyedRejectionSampler] = KeyedRejectionSampler,
) -> None:
    """Replace the runner's samplers by ours; the configured kind must not be ``stock``.

    Raises:
        ConfigError: The engine's configuration needs something that our samplers lack.
    """
    sampler = model_runner.sampler
    if isinstance(sampler.topk_topp_sampler, KeyedTopKTopPSampler):
        return
    rows = KeyedRows(model_runner)
    rows.watch_batch()
    sampler.topk_topp_sampler = drawing(sampler.logprobs_mode, rows, config)
    if hasattr(model_runner, "rejection_sampler"):
        model_runner.rejection_sampler = verifying(
            sampler, model_runner.speculative_config, model_runner.device, rows, config
        )
