"""What the engine tests run inside vLLM's worker processes, imported there by name."""

from __future__ import annotations

from typing import Any

from sam_rollout.integrations.vllm.drafting.proposer import SamProposer
from sam_rollout.integrations.vllm.worker import SamWorkerExtension

EXTENSION = "tests.integration.engines.ProbeExtension"
FORCED_PROPOSER = "tests.integration.engines.ForcedProposer"
# The drafts of the forced proposer at every step of any text.
FORCED_DRAFTS = (40, 41, 42)


class DrafterBrokenOnPurpose(RuntimeError):
    """Raised inside the drafter by the tests."""


class ProbeExtension(SamWorkerExtension):
    """Our worker extension with handles for tests."""

    def break_drafter(self, after_steps: int) -> None:
        """Make the drafter raise once it has served ``after_steps`` more steps."""
        drafter = self._proposer().session.drafter
        original = drafter.draft
        served = 0

        def draft(*args: Any, **kwargs: Any) -> Any:
            nonlocal served
            served += 1
            if served > after_steps:
                raise DrafterBrokenOnPurpose(f"after {after_steps} steps")
            return original(*args, **kwargs)

        drafter.draft = draft


class ForcedProposer(SamProposer):
    """Drafts the same tokens always: most are rejected, which tests the sampler's other half."""

    def propose(self, sampled_token_ids: list[list[int]], *_args: Any, **_kwargs: Any) -> list:
        return [list(FORCED_DRAFTS) if sampled else [] for sampled in sampled_token_ids]
