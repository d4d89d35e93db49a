"""Makes vLLM's rejection sampler run on a CPU, outside an engine."""

from __future__ import annotations


def use_cpu_kernels() -> None:
    """Do what vLLM does before it makes a worker where there is no Triton, after our plugin."""
    from vllm.platforms import current_platform

    from sam_rollout.integrations.vllm.plugin import register

    register()
    current_platform.register_triton_kernel_overrides()
