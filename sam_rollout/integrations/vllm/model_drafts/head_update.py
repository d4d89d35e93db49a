"""Updates a draft head's weights together with the policy's weights, in verl's weight sync.

If the trainer trains a head (`sam.sources.model.train`), it sends the policy first and then the
head, without the head's embedding and output matrix, which head training does not change.
"""

from typing import Any

PREFIX = "sam_head."


class HeadUpdates:
    """A mixin, placed before verl's worker extension, that also loads a draft head's weights."""

    # Attributes of the worker that vLLM mixes the extension into.
    model_runner: Any
    vllm_config: Any
    device: Any

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receive a sync, and renew packed copies of the head's weights."""
        self._head_came = False
        super().update_weights_from_ipc(*args, **kwargs)  # type: ignore[misc]
        if not self._head_came:
            return
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        draft_config = self.vllm_config.speculative_config.draft_model_config
        process_weights_after_loading(self.model_runner.drafter.model, draft_config, self.device)

    def _update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Load the head's tensors of a bucket; verl's method loads the others."""
        weights = list(weights)
        head = [(name[len(PREFIX) :], t) for name, t in weights if name.startswith(PREFIX)]
        if head:
            self.model_runner.drafter.model.load_weights(head)
            self._head_came = True
        if len(head) < len(weights):
            policy = [(name, t) for name, t in weights if not name.startswith(PREFIX)]
            super()._update_weights(policy, *args, **kwargs)  # type: ignore[misc]
