"""Our verification under the names and signatures of ``vllm_ascend.sample.rejection_sampler``.

vllm-ascend cuts verification in pieces that fill buffers for each other: random numbers, a
recovered token for every draft, a bonus token for every request. Here each piece is one call of
ours, fed with what its caller gives, so that both can be compared on the same input and
vllm-ascend's unit tests can be run on ours. Its ``sample_recovered_tokens`` has no counterpart: we
draw at most one token per request, as part of verifying.
"""

from __future__ import annotations

from typing import Any

import torch

from sam_rollout.integrations.vllm_ascend.options import refuse
from sam_rollout.verification import (
    NO_TOKEN,
    DraftLayout,
    expand_batch_to_tokens,
    verify_coupled,
    verify_vectorised,
)
from sam_rollout.verification.inverse_cdf import FRACTION_BITS

__all__ = [
    "expand_batch_to_tokens",
    "expand_pytorch",
    "rejection_greedy_sample_pytorch",
    "rejection_greedy_sample_spec_len_1_pytorch",
    "rejection_random_sample_pytorch",
    "rejection_sample",
]


def rejection_sample(
    draft_token_ids: torch.Tensor,  # [num_drafts]
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,  # [batch]
    draft_probs: torch.Tensor | None,  # [num_drafts, vocabulary]
    target_logits_or_tuple: Any,  # [num_drafts, vocabulary], or that and None
    bonus_token_ids: torch.Tensor,  # [batch, 1]
    sampling_metadata: Any,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    ori_target_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Verify drafts with fresh random numbers; int32 [batch, max_spec_len + 1]."""
    logits, indices = target_logits_or_tuple, None
    if isinstance(target_logits_or_tuple, tuple):
        logits, indices = target_logits_or_tuple
    refuse("enable_reduce_sample", indices is not None)
    layout = DraftLayout(cu_num_draft_tokens, len(draft_token_ids), max_spec_len)
    bonus = bonus_token_ids.view(-1).to(torch.int64)
    if sampling_metadata.all_greedy:
        target_ids = _by_row(layout, logits.argmax(dim=-1), bonus)
        return verify_coupled(layout, draft_token_ids, target_ids)
    greedy = None if sampling_metadata.all_random else sampling_metadata.temperature == 0
    # A distribution that holds nothing but the bonus token draws it, and is likeliest at it.
    certain = torch.nn.functional.one_hot(bonus, logits.shape[1]).to(torch.float32)
    probabilities = _by_row(layout, logits.softmax(dim=-1, dtype=torch.float32), certain)
    return verify_vectorised(
        layout,
        draft_token_ids,
        probabilities,
        _random_bits(layout, num_draft_tokens, sampling_metadata.generators),
        _random_bits(layout, num_draft_tokens, sampling_metadata.generators),
        draft_probabilities=draft_probs,
        greedy=greedy,
    )


def rejection_greedy_sample_pytorch(
    output_token_ids: torch.Tensor,  # [batch, max_spec_len + 1], written where greedy
    cu_num_draft_tokens: torch.Tensor,  # [batch]
    draft_token_ids: torch.Tensor,  # [num_drafts]
    target_argmax: torch.Tensor,  # [num_drafts]
    bonus_token_ids: torch.Tensor,  # [batch, 1]
    draft_tokens_per_req: list[int],
    max_spec_len: int,
    is_greedy: torch.Tensor | None = None,  # [batch]
) -> None:
    """Accept drafts that are the target's likeliest tokens."""
    layout = DraftLayout(cu_num_draft_tokens, len(draft_token_ids), max_spec_len)
    target_ids = _by_row(layout, target_argmax, bonus_token_ids.view(-1))
    _write(output_token_ids, verify_coupled(layout, draft_token_ids, target_ids), is_greedy)


def rejection_greedy_sample_spec_len_1_pytorch(
    output_token_ids: torch.Tensor,  # [batch, 2]
    draft_token_ids: torch.Tensor,  # [batch]
    target_argmax: torch.Tensor,  # [batch]
    bonus_token_ids: torch.Tensor,  # [batch, 1]
) -> None:
    """Do the same where every request has one draft."""
    batch = len(draft_token_ids)
    cumulative = torch.arange(1, batch + 1, device=draft_token_ids.device)
    rejection_greedy_sample_pytorch(
        output_token_ids,
        cumulative,
        draft_token_ids,
        target_argmax,
        bonus_token_ids,
        [1] * batch,
        max_spec_len=1,
    )


def rejection_random_sample_pytorch(
    output_token_ids: torch.Tensor,  # [batch, max_spec_len + 1], written where not greedy
    cu_num_draft_tokens: torch.Tensor,  # [batch]
    draft_token_ids: torch.Tensor,  # [num_drafts]
    draft_probs: torch.Tensor | None,  # [num_drafts, vocabulary]
    target_probs: torch.Tensor,  # [num_drafts, vocabulary]
    bonus_token_ids: torch.Tensor,  # [batch, 1]
    recovered_token_ids: torch.Tensor,  # [num_drafts]
    uniform_probs: torch.Tensor,  # [num_drafts]
    is_greedy: torch.Tensor,  # [batch]
    max_spec_len: int,
    vocab_size: int,
    IS_NGRAM: bool = False,
    target_indices: torch.Tensor | None = None,
    enable_reduce_sampling: bool = False,
    ENTROPY_VERIFY: bool = False,
    **_entropy_options: Any,
) -> None:
    """Accept drafts by the given random numbers; what follows them is given, too.

    Raises:
        ConfigError: Entropy verification or a reduced vocabulary is asked for.
    """
    refuse("enable_reduce_sample", enable_reduce_sampling)
    refuse("rejection_sampler_config.enable_entropy_verify", ENTROPY_VERIFY)
    layout = DraftLayout(cu_num_draft_tokens, len(draft_token_ids), max_spec_len)
    nothing = target_probs.new_zeros(layout.batch, target_probs.shape[1])
    bits = _bits_of(uniform_probs)
    bits = _by_row(layout, bits, bits.new_zeros(layout.batch))
    tokens = verify_vectorised(
        layout,
        draft_token_ids,
        _by_row(layout, target_probs, nothing),
        bits,
        bits,  # what is drawn with them is replaced below
        draft_probabilities=None if IS_NGRAM else draft_probs,
    )
    accepted = (tokens != NO_TOKEN).sum(dim=1) - 1
    recovered = (layout.first_draft + accepted).clamp(max=layout.num_drafts - 1)
    final = torch.where(
        accepted < layout.counts, recovered_token_ids[recovered], bonus_token_ids.view(-1)
    )
    tokens.scatter_(1, accepted.unsqueeze(1), final.to(tokens.dtype).unsqueeze(1))
    _write(output_token_ids, tokens, ~is_greedy)


def expand_pytorch(
    output_ptr: torch.Tensor,  # [num_tokens], written
    input_ptr: torch.Tensor,  # [batch]
    cu_num_tokens_ptr: torch.Tensor,  # [batch]
    replace_from: int | float,
    replace_to: int | float,
    MAX_NUM_TOKENS: int,
) -> None:
    """Repeat each request's value for each of its tokens."""
    expanded = expand_batch_to_tokens(
        input_ptr, cu_num_tokens_ptr, len(output_ptr), replace_from, replace_to
    )
    output_ptr.copy_(expanded)


def _by_row(layout: DraftLayout, of_drafts: torch.Tensor, of_bonus: torch.Tensor) -> torch.Tensor:
    """Merge values of drafts [num_drafts, ...] and bonus rows [batch, ...] to [num_rows, ...]."""
    merged = of_drafts.new_zeros(layout.num_rows, *of_drafts.shape[1:])
    places = torch.arange(layout.max_drafts, device=of_drafts.device)
    drafts = layout.first_draft.unsqueeze(1) + places
    merged[layout.rows[:, :-1][layout.is_draft]] = of_drafts[drafts[layout.is_draft]]
    merged[layout.first_row + layout.counts] = of_bonus.to(of_drafts.dtype)
    return merged


def _bits_of(uniform: torch.Tensor) -> torch.Tensor:
    """Turn numbers in [0, 1) into bits whose leading ones are their binary fraction."""
    fraction = uniform.to(torch.float64).mul(2.0**FRACTION_BITS).to(torch.int64)
    return fraction << (64 - FRACTION_BITS)


def _random_bits(
    layout: DraftLayout, num_draft_tokens: list[int], generators: dict[int, torch.Generator]
) -> torch.Tensor:
    """Draw bits for every row; int64 [rows]. Requests with a seed use their own generator."""
    limits = torch.iinfo(torch.int64)
    bits = torch.empty(layout.num_rows, dtype=torch.int64, device=layout.counts.device)
    bits.random_(limits.min, limits.max)
    first = 0
    for request, drafts in enumerate(num_draft_tokens):
        if request in generators:
            own = bits[first : first + drafts + 1]
            own.random_(limits.min, limits.max, generator=generators[request])
        first += drafts + 1
    return bits


def _write(output: torch.Tensor, tokens: torch.Tensor, where: torch.Tensor | None) -> None:
    tokens = tokens.to(output.dtype)
    output.copy_(tokens if where is None else torch.where(where.unsqueeze(1), tokens, output))
