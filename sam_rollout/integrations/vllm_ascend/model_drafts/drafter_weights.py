"""What of a drafter's weights is the policy's, in vllm-ascend, which loads drafters by itself."""

from __future__ import annotations

import functools
from typing import Any

from sam_rollout.integrations.vllm.model_drafts.drafter_weights import (
    reads_policy,
    share_embeddings,
)


def share_weights() -> None:
    """Have heads of our engines take the policy's embedding and output layer; may be repeated.

    Call it when vllm-ascend's runner has been imported: its drafters settle on a device, too.
    """
    from vllm_ascend.spec_decode.llm_base_proposer import AscendSpecDecodeBaseProposer

    share_embeddings(AscendSpecDecodeBaseProposer)
    share_output_layer(AscendSpecDecodeBaseProposer)


def share_output_layer(loader: Any) -> None:
    """Have EAGLE-3 heads whose files hold no output layer take the policy's.

    vllm-ascend 0.23 to 0.26 give it to the methods `eagle` and `dflash` alone, so that such a head
    of `eagle3` keeps what memory held. Needed until `_maybe_share_lm_head` asks the head, as vLLM's
    does.

    Args:
        loader: The class that loads drafters.
    """
    original = loader._maybe_share_lm_head
    if getattr(original, "sam_rollout", False):
        return

    @functools.wraps(original)
    def share(self: Any, model: Any) -> None:
        original(self, model)
        if not reads_policy(self) or getattr(self.model, "has_own_lm_head", True):
            return
        owner = model if hasattr(model, "lm_head") else model.get_language_model()
        self.model.lm_head = owner.lm_head

    share.__dict__["sam_rollout"] = True
    loader._maybe_share_lm_head = share
