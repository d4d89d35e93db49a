"""Handles the weights of a draft model in an engine that gets weights from a trainer.

Such an engine starts with random policy weights, but reads the drafter's weights from files. vLLM
lets a head share the policy's embedding only if the head's own embedding is equal to it. At the
start the two differ, so the head would keep its own embedding, which weight syncs do not update.
"""

from typing import Any

from sam_rollout.integrations.vllm.engine_settings import has_model
from sam_rollout.integrations.vllm.wrapping import wrap_once

_HEADS = ("eagle", "eagle3")  # methods that use the policy's embedding
_READ_AGAIN = ("draft_model", "medusa")  # for these methods, vLLM uses the policy's load_format
_RANDOM = "dummy"  # load_format of engines that get their weights from a trainer


def share_embeddings(loader: Any) -> None:
    """Let the draft heads of our engines share the policy's embedding; safe to call repeatedly.

    Call this before graphs are captured. `loader` is the class that loads drafters.
    """
    wrap_once(loader, "_maybe_share_embeddings", _sharing)


def _sharing(original: Any) -> Any:
    def share(self: Any, *args: Any, **kwargs: Any) -> Any:
        if reads_policy(self) and hasattr(self.model, "has_own_embed_tokens"):
            self.model.has_own_embed_tokens = False
        return original(self, *args, **kwargs)

    return share


def reads_policy(drafter: Any) -> bool:
    """Whether a drafter belongs to one of our engines, and reads the policy's hidden states."""
    config = drafter.vllm_config
    return has_model(config) and drafter.method in _HEADS


def read_again(runner: Any) -> None:
    """Read the drafter's weights from its files, if the engine began with random weights.

    vLLM ignores `draft_load_config` for the methods in `_READ_AGAIN`.
    """
    config = runner.vllm_config
    speculation = config.speculative_config
    if speculation.method not in _READ_AGAIN or config.load_config.load_format != _RANDOM:
        return
    from vllm.config import LoadConfig, set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, draft_config = runner.drafter.model, speculation.draft_model_config
    with set_current_vllm_config(config):
        get_model_loader(LoadConfig(load_format="auto")).load_weights(model, draft_config)
        # On a CPU, layers compute with packed copies of their weights, which have to be renewed.
        process_weights_after_loading(model, draft_config, runner.device)
