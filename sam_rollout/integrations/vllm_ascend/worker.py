"""The worker extension for vllm-ascend's workers."""

from __future__ import annotations

from sam_rollout.config import RolloutSamplerConfig
from sam_rollout.integrations.vllm.worker import SamWorkerExtension


class SamAscendWorkerExtension(SamWorkerExtension):
    """As on other devices, with samplers that follow vllm-ascend's rules on logits."""

    def _install_sampler(self, config: RolloutSamplerConfig) -> None:
        # Late: importing vllm-ascend's samplers settles on a device.
        from sam_rollout.integrations.vllm_ascend.sampling import install_sampler

        install_sampler(self.model_runner, config)
