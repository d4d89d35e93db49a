"""Drafts bound late in vllm-ascend's runner, which has an asynchronous path of its own.

Of the three ways that the module of the same name for vLLM has, it takes two: steps have no places,
or drafts are bound to them. None is prepared ahead. The attention there reads the lengths of texts
on the host, so that the runner waits for what was sampled while it prepares a step; a step that is
filled instead of bound would start little earlier, and pay for every place.
"""

from __future__ import annotations

from typing import Any

from sam_rollout.integrations.vllm.scheduling.late_binding import LateBinding


class AscendLateBinding(LateBinding):
    """Stands between vllm-ascend's worker and its runner; one per engine."""

    def _fits_ahead(self, rows: int) -> bool:
        """No step is prepared ahead."""
        return False

    def _keep_books(self, scheduler_output: Any, sampler_output: Any, *args: Any) -> Any:
        """Leave the sampled tokens to the next step, which vllm-ascend expects of a drafter.

        A step that had places is read before the next one is prepared, from the host's arrays.
        """
        sampled = sampler_output.sampled_token_ids  # [B, most tokens]
        one_each = sampled.shape[-1] == 1
        self._runner.input_batch.prev_sampled_token_ids = sampled if one_each else None
        return self._wrapped["_bookkeeping_sync"](scheduler_output, sampler_output, *args)
