"""Contains classes that vLLM's worker processes import by name in engine tests."""

from typing import Any

from sam_rollout.integrations.vllm.drafting.proposer import SamProposer

FORCED_PROPOSER = "tests.integration.engines.ForcedProposer"
FORCED_DRAFTS = (40, 41, 42)


class ForcedProposer(SamProposer):
    def propose(self, sampled_token_ids: list[list[int]], *_args: Any, **_kwargs: Any) -> list:
        return [list(FORCED_DRAFTS) if sampled else [] for sampled in sampled_token_ids]
