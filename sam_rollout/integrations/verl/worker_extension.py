"""Combines verl's worker extension (weight sync) with ours (drafter)."""

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from sam_rollout.integrations.verl.weight_transfer import WeightReceiving
from sam_rollout.integrations.vllm.model_drafts.head_update import HeadUpdates
from sam_rollout.integrations.vllm.worker import SamWorkerExtension


class SamColocateWorkerExtension(
    WeightReceiving, HeadUpdates, vLLMColocateWorkerExtension, SamWorkerExtension
):
    """The worker extension of verl's engines."""
