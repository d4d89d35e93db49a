"""Runs our samplers inside vllm-ascend, with vllm-ascend's own processing of logits.

vllm-ascend's methods apply top-k, top-p and, where Triton runs, penalties. Like vllm-ascend, we
replace NaN and infinite logits.
"""

from operator import attrgetter
from typing import Any

import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm_ascend.ascend_config import get_ascend_config
from vllm_ascend.sample.rejection_sampler import AscendRejectionSampler
from vllm_ascend.sample.sampler import AscendSampler, apply_top_k_top_p

from sam_rollout.config import ConfigError, RolloutSamplerConfig
from sam_rollout.integrations.vllm.sampling import samplers
from sam_rollout.integrations.vllm.sampling.keyed_rows import KeyedRows
from sam_rollout.integrations.vllm.sampling.samplers import (
    KeyedRejectionSampler,
    KeyedTopKTopPSampler,
    VerifyStep,
)

# Field of vllm-ascend's additional_config that has to stay off -> what the field would switch on.
REFUSED = {
    "enable_reduce_sample": "sampling from parts of the vocabulary on several devices",
    "enable_async_exponential": "noise that is drawn before the logits are known",
    "rejection_sampler_config.enable_block_verify": "accepting drafts by blocks",
    "rejection_sampler_config.enable_entropy_verify": "accepting more than the target would sample",
}


def heed_logprobs_mode(model_runner: Any) -> None:
    """Make the runner's samplers follow the engine's ``logprobs_mode``.

    vllm-ascend 0.23 to 0.26 ignore ``logprobs_mode``. This function can go when ``NPUModelRunner``
    passes the mode on to its samplers.
    """
    mode = model_runner.model_config.logprobs_mode
    if model_runner.sampler.logprobs_mode == mode:
        return
    model_runner.sampler = AscendSampler(logprobs_mode=mode)
    if hasattr(model_runner, "rejection_sampler"):
        model_runner.rejection_sampler = AscendRejectionSampler(model_runner.sampler)


def install_sampler(model_runner: Any, config: RolloutSamplerConfig) -> None:
    """Replace the runner's samplers by ours, unless the configured kind is ``stock``.

    Raises:
        ConfigError: The engine's configuration needs something that our samplers lack.
    """
    if config.kind == "stock":
        return
    for field, reason in REFUSED.items():
        if value := attrgetter(field)(get_ascend_config()):
            raise ConfigError(
                f"additional_config.{field}",
                value,
                f"must be false ({reason}) unless rollout_sampler.kind = 'stock'",
            )
    for field in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (value := getattr(model_runner.vllm_config.parallel_config, field)) > 1:
            raise ConfigError(
                f"parallel_config.{field}",
                value,
                "must be 1 (otherwise a device knows only the positions of its share of a text) "
                "unless rollout_sampler.kind = 'stock'",
            )
    samplers.install_sampler(
        model_runner, config, AscendKeyedTopKTopPSampler, AscendKeyedRejectionSampler
    )


class AscendKeyedTopKTopPSampler(KeyedTopKTopPSampler):
    """Replaces ``AscendTopKTopPSampler``, but applies top-k and top-p in the same way."""

    _cut = staticmethod(apply_top_k_top_p)


class AscendKeyedRejectionSampler(KeyedRejectionSampler, AscendRejectionSampler):
    """Replaces ``AscendRejectionSampler``, but keeps its processing of logits."""

    _cut = staticmethod(apply_top_k_top_p)

    def __init__(
        self, sampler: Any, _spec: Any, _device: Any, rows: KeyedRows, config: RolloutSamplerConfig
    ) -> None:
        # vllm-ascend's constructor takes only the sampler.
        AscendRejectionSampler.__init__(self, sampler)
        self.config = config
        self._rows = rows

    @staticmethod
    def apply_penalties(
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        metadata: SpecDecodeMetadata,
        repeat_indices: torch.Tensor,
        output_token_ids: list[list[int]],
    ) -> torch.Tensor:
        # Without Triton, vllm-ascend's method fails unless each request has one draft row.
        kind = AscendRejectionSampler if HAS_TRITON else RejectionSampler
        return kind.apply_penalties(
            logits, sampling_metadata, metadata, repeat_indices, output_token_ids
        )

    def _process(self, logits: torch.Tensor, step: VerifyStep) -> torch.Tensor:
        info = torch.finfo(logits.dtype)
        logits = torch.nan_to_num_(logits, nan=0.0, posinf=info.max, neginf=info.min)
        return super()._process(logits, step)
