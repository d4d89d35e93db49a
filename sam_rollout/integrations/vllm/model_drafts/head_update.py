"""Updates a draft head's weights together with the policy's weights, in verl's weight sync.

If the trainer trains a head (`sam.sources.model.train`), it sends the head's weights after the
policy's. It does not send the head's embedding and output matrix, which training does not change.
"""

from typing import Any

PREFIX = "sam_head."


class HeadUpdates:
    """A mixin that loads a draft head's weights.

    Among a class's bases, it has to come before verl's worker extension.
    """

    model_runner: Any
    vllm_config: Any
    device: Any

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Receive a weight sync; if it has weights of the head, renew their packed copies."""
        self._head_came = False
        super().update_weights_from_ipc(*args, **kwargs)  # type: ignore[misc]
        if not self._head_came:
            return
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        draft_config = self.vllm_config.speculative_config.draft_model_config
        process_weights_after_loading(self.model_runner.drafter.model, draft_config, self.device)

    def _update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Load those tensors of a bucket that are the head's; verl's method loads the others."""
        weights = list(weights)
        head = [(name[len(PREFIX) :], t) for name, t in weights if name.startswith(PREFIX)]
        if head:
            self.model_runner.drafter.model.load_weights(head)
            self._head_came = True
        if len(head) < len(weights):
            policy = [(name, t) for name, t in weights if not name.startswith(PREFIX)]
            super()._update_weights(policy, *args, **kwargs)  # type: ignore[misc]
