"""Workarounds for bugs of vLLM's CPU backend."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = (
    "model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    "utils.cpu_triton_utils:_expand_kernel_impl",
    "utils.cpu_triton_utils:_rejection_random_sample_kernel_impl",
)
