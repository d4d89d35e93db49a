"""Proof that the configured drafter is the one that runs.

A published integration maps its method name into vLLM's n-gram branch, and its benchmarks then
measure the n-gram proposer. A run of ours refuses to start in that case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sam_rollout.config import SamConfig
from sam_rollout.integrations.vllm.settings import PROPOSER_CLASS


class WrongDrafterError(RuntimeError):
    """The engine instantiated another drafter than the configuration asks for."""


def check_drafters(reports: Sequence[dict[str, Any]], config: SamConfig) -> str:
    """Compare every worker's report (``sam_bind``) with the configuration.

    Returns:
        One line that names what runs, for the log.

    Raises:
        WrongDrafterError: A worker runs another drafter class or another configuration.
    """
    expected = PROPOSER_CLASS if config.enabled else None
    found = sorted({str(report["proposer"]) for report in reports})
    if found != [str(expected)]:
        raise WrongDrafterError(
            f"sam.enabled={config.enabled} asks for the drafter {expected}, but the engine's "
            f"workers run {', '.join(found)}. Check rollout.engine_kwargs.vllm.speculative_config "
            "for another method, and the installed sam_rollout package on every node."
        )
    if config.enabled and any(report["sam"] != config.to_mapping() for report in reports):
        raise WrongDrafterError(
            f"the engine's workers run with {reports[0]['sam']}, not {config.to_mapping()}"
        )
    if not config.enabled:
        return "sam_rollout: no drafter (sam.enabled=false)"
    return (
        f"sam_rollout: drafter {expected} on {len(reports)} worker(s), "
        f"k={config.max_draft_tokens}, gate={config.gate.kind}"
        f" (threshold {config.gate.threshold})"
    )
