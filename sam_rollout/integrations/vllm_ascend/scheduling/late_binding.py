"""Late binding in vllm-ascend's runner, which has an asynchronous path of its own.

Of the three ways in vLLM's module of the same name, no step is prepared ahead here: the attention
on NPUs reads the lengths of texts on the host, so the runner waits for the sampled tokens while it
prepares a step. It would hardly start earlier, but would compute the places that get no draft.
"""

from __future__ import annotations

from typing import Any

from sam_rollout.integrations.vllm.scheduling.late_binding import LateBinding


class AscendLateBinding(LateBinding):
    """Wraps methods of vllm-ascend's runner; one per engine."""

    def _fits_ahead(self, rows: int) -> bool:
        return False

    def _keep_books(self, scheduler_output: Any, sampler_output: Any, *args: Any) -> Any:
        """Leave the sampled tokens on the device for the next step, as drafters of vllm-ascend do.

        After a step with places for drafts no tokens are left on the device, because they are read
        on the host before the next step is prepared.
        """
        sampled = sampler_output.sampled_token_ids  # [B, most tokens]
        one_each = sampled.shape[-1] == 1
        self._runner.input_batch.prev_sampled_token_ids = sampled if one_each else None
        return self._wrapped["_bookkeeping_sync"](scheduler_output, sampler_output, *args)
