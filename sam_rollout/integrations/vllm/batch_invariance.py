"""Finds out whether a worker uses batch-invariant kernels.

With such kernels a token's logits do not depend on the rest of the batch. The environment variable
`VLLM_BATCH_INVARIANT`, set before an engine's processes start, switches the kernels on. On a device
without such kernels the variable has no effect, and no error is raised. We have read the kernels of
vLLM 0.24 and 0.31 and of vllm-ascend 0.23, but have not run them.
"""

import sys

BATCH_INVARIANT_ENV = "VLLM_BATCH_INVARIANT"
# Attention backends of vLLM that declare `supports_batch_invariance`.
BACKENDS = ("FLASH_ATTN", "FLASH_ATTN_MLA", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_MLA")
# Module -> name of a variable that the module sets once it has replaced operators. vLLM moved its
# module after 0.24.
_SWITCHES = {
    "vllm.model_executor.determinism.batch_invariant": "_batch_invariant_MODE",
    "vllm.model_executor.layers.batch_invariant": "_batch_invariant_MODE",
    "vllm_ascend.batch_invariant": "_batch_invariant_LIB",
}


def is_in_force() -> bool:
    """Whether this worker process computes with batch-invariant kernels."""
    return any(getattr(sys.modules.get(name), switch, None) for name, switch in _SWITCHES.items())
