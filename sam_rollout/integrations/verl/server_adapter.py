"""The training side of verl's weight sync; it can send a draft head after the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from torch import Tensor
from verl.workers.rollout.vllm_rollout import ServerAdapter

from sam_rollout.integrations.verl.weight_transfer import watch_senders

watch_senders()


class SamServerAdapter(ServerAdapter):
    """The adapter of one training process; vLLM's side is in model_drafts/head_update.py."""

    head_weights: Callable[[], Iterable[tuple[str, Tensor]]] | None = None

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Send the policy's weights, then the weights of a trained head."""
        if self.head_weights is not None:
            weights = chain(weights, self.head_weights())
        await super().update_weights(weights, *args, **kwargs)
