"""Workarounds for bugs of vLLM's CPU backend."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = (
    "model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "utils.cpu_triton_utils:_expand_kernel_impl",
    "utils.cpu_triton_utils:_rejection_random_sample_kernel_impl",
)
