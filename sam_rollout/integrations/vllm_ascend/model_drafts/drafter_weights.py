"""The weights that a draft head shares with the policy in vllm-ascend, which has its own loader."""

from __future__ import annotations

from typing import Any

from sam_rollout.integrations.vllm.model_drafts.drafter_weights import (
    reads_policy,
    share_embeddings,
)
from sam_rollout.integrations.vllm.wrapping import wrap_once


def share_weights() -> None:
    """Make our engines' draft heads use the policy's embedding and output layer.

    Call it after vllm-ascend's runner was imported, because its imports choose a device.
    """
    from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer

    share_embeddings(AscendSpecDecodeBaseProposer)
    wrap_once(AscendSpecDecodeBaseProposer, "_maybe_share_lm_head", _sharing_output_layer)


def _sharing_output_layer(original: Any) -> Any:
    """Give EAGLE-3 heads the policy's output layer if they have none of their own.

    vllm-ascend 0.23 to 0.26 do this only for the methods `eagle` and `dflash`. This wrapper can go
    when `_maybe_share_lm_head` checks whether the head has the layer, as vLLM's method does.
    """

    def share(self: Any, model: Any) -> None:
        original(self, model)
        if not reads_policy(self) or getattr(self.model, "has_own_lm_head", True):
            return
        owner = model if hasattr(model, "lm_head") else model.get_language_model()
        self.model.lm_head = owner.lm_head

    return share
