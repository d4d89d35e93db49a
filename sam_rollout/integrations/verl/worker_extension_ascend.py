"""Combines verl's worker extension (weight sync) with ours for vllm-ascend."""

from __future__ import annotations

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from sam_rollout.integrations.verl.weight_transfer import WeightReceiving
from sam_rollout.integrations.vllm.model_drafts.head_update import HeadUpdates
from sam_rollout.integrations.vllm_ascend.worker import SamAscendWorkerExtension


class SamColocateAscendWorkerExtension(
    WeightReceiving, HeadUpdates, vLLMColocateWorkerExtension, SamAscendWorkerExtension
):
    """The worker extension of verl's engines on NPUs."""
