"""The worker extensions for vllm-ascend's workers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sam_rollout.config import RolloutSamplerConfig
from sam_rollout.integrations.vllm.operators.known_text import KnownTextExtension
from sam_rollout.integrations.vllm.worker import SamWorkerExtension

if TYPE_CHECKING:
    from sam_rollout.integrations.vllm.drafting.proposer import SamProposer

ENGINE_DRAFTER = (
    "sam_rollout.integrations.vllm_ascend.model_drafts.engine_drafter:AscendEngineDrafter"
)


class SamAscendWorkerExtension(SamWorkerExtension):
    """The worker extension with vllm-ascend's samplers and draft models."""

    def sam_bind(self, record: bool = True) -> dict[str, Any]:
        """Bind like the parent class, and report how our code got into the runner (``way_in``)."""
        from sam_rollout.integrations.vllm_ascend.plugin import way_in

        return super().sam_bind(record) | {"way_in": way_in()}

    def _make_proposer(self) -> SamProposer:
        proposer = super()._make_proposer()
        proposer.engine_drafter = ENGINE_DRAFTER
        return proposer

    def _install_sampler(self, config: RolloutSamplerConfig) -> None:
        from sam_rollout.integrations.vllm_ascend.hooks import install_samplers

        install_samplers(self.model_runner)  # which finds `config` itself


class KnownTextAscendExtension(SamAscendWorkerExtension, KnownTextExtension):
    """Makes requests decode known texts, in vllm-ascend's workers."""
