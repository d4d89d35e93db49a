"""What the engine's front end can ask of a worker process about its drafter and samplers.

vLLM mixes this class into its worker (``worker_extension_cls``), so ``self`` is the worker and
every public method is reachable through ``collective_rpc``.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from sam_rollout.integrations.vllm.batch_invariance import is_in_force
from sam_rollout.integrations.vllm.engine_settings import (
    ENGINES_OWN_SAMPLER,
    has_model,
    settings_of,
)

# The extension is imported before the model is loaded, also where the package's entry points are
# not installed (code shipped through PYTHONPATH): this is the second chance for the workarounds.
from sam_rollout.integrations.vllm.plugin import register

if TYPE_CHECKING:
    from sam_rollout.config import RolloutSamplerConfig
    from sam_rollout.integrations.vllm.drafting.proposer import SamProposer

register()


class SamWorkerExtension:
    """Worker methods for installing, checking and draining drafter and samplers."""

    # Of the worker that vLLM mixes this class into.
    model_runner: Any
    vllm_config: Any

    def sam_bind(self, record: bool = True) -> dict[str, Any]:
        """Install the samplers, connect the proposer, and report what is really running.

        Returns:
            ``sampler``: the kind that is installed. ``batch_invariant``: whether kernels are.
            ``proposer``: None without a drafter, its class
            name when it is not ours, and otherwise all of ``SamProposer.describe()``.
        """
        from sam_rollout.integrations.vllm.drafting.proposer import is_output_rank
        from sam_rollout.integrations.vllm.second_runner.runner_choice import is_second_runner

        if is_second_runner(self.model_runner):
            from sam_rollout.integrations.vllm.second_runner.speculator import attach

            attach(self.model_runner)
        self._install_sampler(settings_of(self.vllm_config).sampler)
        report = {
            "sampler": self._installed_sampler(),
            "batch_invariant": is_in_force(),
            "proposer": None,
        }
        drafter = self._proposer()
        if drafter is None:
            return report
        if not hasattr(drafter, "describe"):
            return report | {"proposer": f"{type(drafter).__module__}.{type(drafter).__qualname__}"}
        drafter.bind(self.model_runner, drafts_are_used=is_output_rank(), record=record)
        return report | drafter.describe()

    def _proposer(self) -> Any:
        """Ours; where vLLM runs a drafter itself, beside that; vLLM's without ours, or None."""
        from sam_rollout.integrations.vllm.drafting.proposer import PROPOSER_ATTRIBUTE

        runner, config = self.model_runner, self.vllm_config
        drafter = getattr(runner, "drafter", None)
        if drafter is None or not has_model(config):
            return drafter
        if not hasattr(runner, PROPOSER_ATTRIBUTE):
            setattr(runner, PROPOSER_ATTRIBUTE, self._make_proposer())
        return getattr(runner, PROPOSER_ATTRIBUTE)

    def _make_proposer(self) -> SamProposer:
        """Ours, for a runner whose drafter is vLLM's own."""
        from sam_rollout.integrations.vllm.drafting.proposer import SamProposer

        return SamProposer(self.vllm_config)

    def _install_sampler(self, config: RolloutSamplerConfig) -> None:
        """Replace the runner's samplers; other kinds of workers have others to replace."""
        if config.kind != ENGINES_OWN_SAMPLER.kind:
            self._samplers().install_sampler(self.model_runner, config)

    def _installed_sampler(self) -> str:
        """Name the kind of samplers that is really installed."""
        return self._samplers().installed_sampler(self.model_runner)

    def _samplers(self) -> ModuleType:
        """The module with the samplers for this worker's kind of model runner."""
        from sam_rollout.integrations.vllm.second_runner.runner_choice import is_second_runner

        if is_second_runner(self.model_runner):
            from sam_rollout.integrations.vllm.second_runner import speculator

            return speculator
        from sam_rollout.integrations.vllm.sampling import samplers

        return samplers

    def sam_exchange_texts(self, origin: str, pieces: list) -> list[tuple]:
        """Hand in pieces of responses that other engines sample; return what is new of own ones.

        Called between two engine steps, as every method here.
        """
        drafter = self._proposer()
        if not hasattr(drafter, "exchange_texts"):
            return []
        return [tuple(piece) for piece in drafter.exchange_texts(origin, pieces)]

    def sam_probe(self, begin: bool) -> tuple[int, int] | None:
        """Begin or end a probe of the model that drafts, as ``SamProposer.probe``."""
        drafter = self._proposer()
        return drafter.probe(begin) if hasattr(drafter, "probe") else None

    def sam_pause(self, paused: bool) -> None:
        """Draft nothing for a while, unseen by drafter and records; ``DraftSession.pause``."""
        drafter = self._proposer()
        if hasattr(drafter, "pause"):
            drafter.pause(paused)

    def sam_drain(self) -> dict[str, Any] | None:
        """Return the drafter's records since the last call; None where there is no drafter."""
        drafter = self._proposer()
        return drafter.drain() if hasattr(drafter, "drain") else None
