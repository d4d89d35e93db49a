"""The weights of a model that drafts: what is the policy's follows it, the rest stays as read.

A trainer starts engines with random weights and sends the policy's afterwards. The drafter's come
from its files alone. vLLM shares the policy's embedding with a head whose files repeat it only if
both are equal, which they are not before the policy's weights are there; a head that keeps its own
would fall behind a policy that is trained.
"""

from __future__ import annotations

import functools
from typing import Any

from sam_rollout.integrations.vllm.engine_settings import has_model

_HEADS = ("eagle", "eagle3")  # that read the embedding of the policy
_READ_AGAIN = ("draft_model", "medusa")  # that vLLM loads like the policy
_RANDOM = "dummy"  # load_format of engines that a trainer sends weights to


def share_embeddings(loader: Any = None) -> None:
    """Have heads of our engines take the policy's embedding; harmless when repeated.

    Before anything is captured, hence not when the engine has started.

    Args:
        loader: The class that loads drafters; by default vLLM's.
    """
    if loader is None:
        try:
            from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
        except ImportError:  # a release that no model drafts in
            return
        loader = SpecDecodeBaseProposer
    original = loader._maybe_share_embeddings
    if getattr(original, "sam_rollout", False):
        return

    @functools.wraps(original)
    def share(self: Any, *args: Any, **kwargs: Any) -> Any:
        if reads_policy(self) and hasattr(self.model, "has_own_embed_tokens"):
            self.model.has_own_embed_tokens = False
        return original(self, *args, **kwargs)

    share.__dict__["sam_rollout"] = True
    loader._maybe_share_embeddings = share


def reads_policy(drafter: Any) -> bool:
    """Whether a drafter of vLLM's is a head on the policy's hidden states, of an engine of ours."""
    config = drafter.vllm_config
    return has_model(config) and drafter.method in _HEADS


def read_again(runner: Any) -> bool:
    """Read a small model's weights from its files, if the engine began with random ones.

    vLLM reads heads by a load format of their own, which it does not ask for a model of any kind.

    Returns:
        Whether they were read.
    """
    config = runner.vllm_config
    speculation = config.speculative_config
    if speculation.method not in _READ_AGAIN or config.load_config.load_format != _RANDOM:
        return False
    from vllm.config import LoadConfig, set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, draft_config = runner.drafter.model, speculation.draft_model_config
    with set_current_vllm_config(config):
        get_model_loader(LoadConfig(load_format="auto")).load_weights(model, draft_config)
        # A CPU's layers keep packed copies, which are what is computed with.
        process_weights_after_loading(model, draft_config, runner.device)
    return True
