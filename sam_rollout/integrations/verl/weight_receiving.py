"""The engine's side of a weight sync: verl's, which tells the sender what it failed of."""

from __future__ import annotations

from typing import Any

from sam_rollout.integrations.verl.weight_transfer import tell_sender
from sam_rollout.integrations.vllm.serving.tied_weights import ties_over_buckets


class WeightReceiving:
    """Mixed into verl's worker extension, before its own class."""

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """Take in a sync, whose sender waits for every bucket to be taken."""
        try:
            with ties_over_buckets():
                super().update_weights_from_ipc(*args, **kwargs)  # type: ignore[misc]
        except Exception as error:
            tell_sender(self._get_zmq_handle(), error)  # type: ignore[attr-defined]
            raise
