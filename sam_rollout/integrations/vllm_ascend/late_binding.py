"""Late binding in vllm-ascend's runner.

No step is prepared ahead: attention on NPUs reads the lengths of texts on the host. So the runner
waits for the sampled tokens before it prepares a step.
"""

from __future__ import annotations

from typing import Any

from sam_rollout.integrations.vllm.scheduling.late_binding import LateBinding


class AscendLateBinding(LateBinding):
    """Wraps methods of vllm-ascend's runner; one per engine."""

    def _fits_ahead(self, rows: int) -> bool:
        return False

    def _keep_books(self, scheduler_output: Any, sampler_output: Any, *args: Any) -> Any:
        """Leave the tokens of a step without placeholders on the device for the next step."""
        sampled = sampler_output.sampled_token_ids  # [B, most tokens]
        one_each = sampled.shape[-1] == 1
        self._runner.input_batch.prev_sampled_token_ids = sampled if one_each else None
        return self._wrapped["_bookkeeping_sync"](scheduler_output, sampler_output, *args)
