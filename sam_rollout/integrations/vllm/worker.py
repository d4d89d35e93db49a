"""Lets an engine's front end reach the drafter and the samplers in the engine's workers."""

from collections.abc import Sequence
from typing import Any

from sam_rollout.core.identity import RequestIdentity
from sam_rollout.integrations.vllm.ascend import hooks_of
from sam_rollout.integrations.vllm.batch_invariance import is_in_force
from sam_rollout.integrations.vllm.engine_settings import (
    ENGINES_OWN_SAMPLER,
    has_model,
    settings_of,
)

# `register` has to run before the model is loaded, even if no entry points are installed.
from sam_rollout.integrations.vllm.plugin import register

register()


class SamWorkerExtension:
    """Adds methods to vLLM's worker; vLLM mixes this class in, so ``self`` is the worker."""

    model_runner: Any
    vllm_config: Any

    def sam_bind(self, record: bool = True) -> dict[str, Any]:
        """Install the samplers, connect the proposer, and report what is really running.

        The report's keys are ``sampler`` (the installed kind), ``batch_invariant`` and ``proposer``
        (the drafter's class name, or None). If the drafter is ours, the keys of
        ``SamProposer.describe()`` are added.
        """
        from sam_rollout.integrations.vllm.drafting.proposer import is_output_rank
        from sam_rollout.integrations.vllm.second_runner.runner_choice import is_second_runner

        runner, sampler = self.model_runner, settings_of(self.vllm_config).sampler
        samplers: Any
        if is_second_runner(runner):
            from sam_rollout.integrations.vllm.second_runner import speculator

            speculator.attach(runner)
            samplers = speculator
        else:
            from sam_rollout.integrations.vllm.sampling import samplers as of_first_runner

            samplers = of_first_runner
        if hooks := hooks_of(runner):
            hooks.install_samplers(runner)
        elif sampler.kind != ENGINES_OWN_SAMPLER.kind:
            samplers.install_sampler(runner, sampler)
        report: dict[str, Any] = {
            "sampler": samplers.installed_sampler(runner),
            "batch_invariant": is_in_force(),
            "proposer": None,
        }
        drafter = self._proposer()
        if drafter is None:
            return report
        if not hasattr(drafter, "describe"):
            return report | {"proposer": f"{type(drafter).__module__}.{type(drafter).__qualname__}"}
        drafter.bind(runner, drafts_are_used=is_output_rank(), record=record)
        return report | drafter.describe()

    def _proposer(self) -> Any:
        from sam_rollout.integrations.vllm.drafting.proposer import PROPOSER_ATTRIBUTE, SamProposer

        runner, config = self.model_runner, self.vllm_config
        drafter = getattr(runner, "drafter", None)
        if drafter is None or not has_model(config):
            return drafter
        if not hasattr(runner, PROPOSER_ATTRIBUTE):
            setattr(runner, PROPOSER_ATTRIBUTE, SamProposer(config))
        return getattr(runner, PROPOSER_ATTRIBUTE)

    def _session(self) -> Any:
        """Return our drafter's session; None on ranks whose drafts vLLM does not read."""
        return getattr(self._proposer(), "session", None)

    def sam_exchange_texts(self, origin: str, pieces: list) -> list[tuple]:
        """Give other engines' texts to the session; return this engine's new texts."""
        session = self._session()
        new = [] if session is None else session.exchange_texts(origin, pieces)
        return [tuple(piece) for piece in new]

    def sam_probe(self, begin: bool) -> tuple[int, int] | None:
        """Begin or end a probe of the draft model; see ``EngineDrafter.probe``."""
        drafter = self._proposer()
        return drafter.probe(begin) if hasattr(drafter, "probe") else None

    def sam_pause(self, paused: bool) -> None:
        """Pause or resume drafting; see ``DraftSession.pause``."""
        if (session := self._session()) is not None:
            session.pause(paused)

    def sam_drain(self, going_on: Sequence[dict] = ()) -> dict[str, Any] | None:
        """Return the drafter's records since the last call; None without a drafter.

        ``going_on`` has a dict for each unfinished response: the fields of its identity.
        """
        drafter = self._proposer()
        if not hasattr(drafter, "drain"):
            return None
        return drafter.drain([RequestIdentity(**one) for one in going_on])
