"""What the engine's front end can ask of a worker process about its drafter.

vLLM mixes this class into its worker (``worker_extension_cls``), so ``self`` is the worker and
every public method is reachable through ``collective_rpc``.
"""

from __future__ import annotations

from typing import Any

# The extension is imported before the model is loaded, also where the package's entry points are
# not installed (code shipped through PYTHONPATH): this is the second chance for the workarounds.
from sam_rollout.integrations.vllm.plugin import register

register()


class SamWorkerExtension:
    """Worker methods for binding, checking and draining the drafter."""

    def sam_bind(self, record: bool = True) -> dict[str, Any]:
        """Connect the proposer to its model runner and report what is really running.

        Returns:
            ``{"proposer": None}`` without a drafter; otherwise ``SamProposer.describe()``, or just
            the class name when the drafter is not ours.
        """
        from vllm.distributed import get_pp_group, get_tp_group

        drafter = getattr(self.model_runner, "drafter", None)
        if drafter is None:
            return {"proposer": None}
        if not hasattr(drafter, "describe"):
            return {"proposer": f"{type(drafter).__module__}.{type(drafter).__qualname__}"}
        is_output_rank = get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank
        drafter.bind(self.model_runner, drafts_are_used=is_output_rank, record=record)
        return drafter.describe()

    def sam_drain(self) -> dict[str, Any] | None:
        """Return the drafter's records since the last call; None where there is no drafter."""
        drafter = getattr(self.model_runner, "drafter", None)
        return drafter.drain() if hasattr(drafter, "drain") else None
