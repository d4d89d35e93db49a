"""Our rejection samplers as vLLM's own tests make and call one.

They mock the sampler that draws bonus tokens, and give the logits of drafts alone. So the bonus row
of every request is added here, certain of the token that the mock names. Everything after that is
``KeyedRejectionSampler``'s own way. There is no engine to tell requests and positions: seeded
requests are keyed by their generator's seed, others by a number that is drawn anew for every call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from sam_rollout.config import RolloutSamplerConfig
from sam_rollout.integrations.vllm.sampling.samplers import KeyedRejectionSampler
from sam_rollout.verification import DraftLayout, keyed_bits


def draft_and_bonus_rows(metadata: SpecDecodeMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a verify step's rows are: request by request, its drafts and then its bonus token."""
    layout = DraftLayout(
        metadata.cu_num_draft_tokens, len(metadata.draft_token_ids), metadata.max_spec_len
    )
    bonus_rows = layout.first_row + layout.counts
    is_draft = torch.ones(layout.num_rows, dtype=torch.bool)
    is_draft[bonus_rows] = False
    return is_draft.nonzero().squeeze(1), bonus_rows


class _Adapter(KeyedRejectionSampler):
    kind: str  # of RolloutSamplerConfig

    def __init__(
        self, sampler: Any, spec_config: Any = None, device: torch.device | None = None
    ) -> None:
        config = RolloutSamplerConfig(kind=self.kind)
        super().__init__(sampler, spec_config, device, _Rows(), config)
        # Of bonus rows, which hold what the mocked sampler drew.
        sampler.apply_logits_processors.side_effect = lambda logits, *_: logits

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,  # [num_drafts, vocabulary]
        sampling_metadata: SamplingMetadata,
    ) -> Any:
        layout = DraftLayout(
            metadata.cu_num_draft_tokens, len(metadata.draft_token_ids), metadata.max_spec_len
        )
        bonus_ids = self.sampler().sampled_token_ids.view(-1)
        draft_rows, bonus_rows = draft_and_bonus_rows(metadata)
        rows = logits.new_full((layout.num_rows, logits.shape[1]), -float("inf"))
        rows[draft_rows] = logits[metadata.target_logits_indices]
        rows[bonus_rows, bonus_ids] = 0.0
        self._rows.begin_step(layout.batch, sampling_metadata.generators)
        places = torch.arange(layout.num_rows) - layout.first_row[layout.request_of_row]
        metadata = replace(
            metadata,
            target_logits_indices=draft_rows,
            bonus_logits_indices=bonus_rows,
            logits_indices=places,
        )
        return super().forward(metadata, draft_probs, rows, sampling_metadata)


class CoupledSampler(_Adapter):
    kind = "coupled"


class CoupledGumbelSampler(_Adapter):
    kind = "coupled_gumbel"


class VectorisedSampler(_Adapter):
    kind = "vectorised"


class _Rows:
    """In place of ``KeyedRows``: a request's tokens have positions 0, 1, ... in every step."""

    def begin_step(self, batch: int, generators: dict[int, torch.Generator]) -> None:
        limits = torch.iinfo(torch.int64)
        self._keys = torch.empty(batch, dtype=torch.int64).random_(limits.min, limits.max)
        for request, generator in generators.items():
            self._keys[request] = generator.initial_seed()

    def verify_bits(
        self, positions: torch.Tensor, request_of_row: torch.Tensor, stream: int = 0
    ) -> torch.Tensor:
        return keyed_bits(self._keys[request_of_row], positions, stream)
