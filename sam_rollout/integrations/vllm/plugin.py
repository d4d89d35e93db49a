"""Entry point ``vllm.general_plugins``: runs once in every process that vLLM starts."""

from __future__ import annotations


def register() -> None:
    """Apply what the installed vLLM needs; cheap and safe to call repeatedly."""
    from sam_rollout.integrations.vllm.cpu_workarounds import apply_cpu_workarounds

    apply_cpu_workarounds()
