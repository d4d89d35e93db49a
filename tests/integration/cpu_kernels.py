"""Makes vLLM's rejection sampler run on a CPU, outside an engine."""

from __future__ import annotations


def use_cpu_kernels() -> None:
    """Do what vLLM's CPU runner does where there is no Triton, after our plugin."""
    import vllm.utils.cpu_triton_utils as cpu_triton_utils
    import vllm.v1.sample.rejection_sampler as sampler

    from sam_rollout.integrations.vllm.plugin import register

    register()
    for name in (
        "rejection_greedy_sample_kernel",
        "rejection_random_sample_kernel",
        "expand_kernel",
        "sample_recovered_tokens_kernel",
    ):
        setattr(sampler, name, getattr(cpu_triton_utils, name))
