"""Batch-invariant kernels: a token's logits do not depend on the rest of the batch.

The kernels belong to vLLM (we read 0.24 and 0.31) and to vllm-ascend (we read 0.23). One
environment variable, set before an engine's processes start, switches them on. On a device without
such kernels the variable has no effect and raises no error, so workers are asked whether the
kernels are in force. The kernels need an accelerator, and we have not run them.
"""

from __future__ import annotations

import sys

BATCH_INVARIANT_ENV = "VLLM_BATCH_INVARIANT"
# Attention backends of vLLM that declare `supports_batch_invariance`.
BACKENDS = ("FLASH_ATTN", "FLASH_ATTN_MLA", "FLEX_ATTENTION", "TRITON_ATTN", "TRITON_MLA")
# Module -> its variable that is set when a worker's operators have been replaced. vLLM moved the
# module after 0.24.
_SWITCHES = {
    "vllm.model_executor.determinism.batch_invariant": "_batch_invariant_MODE",
    "vllm.model_executor.layers.batch_invariant": "_batch_invariant_MODE",
    "vllm_ascend.batch_invariant": "_batch_invariant_LIB",
}


def is_in_force() -> bool:
    """Whether this worker process computes with batch-invariant kernels."""
    return any(getattr(sys.modules.get(name), switch, None) for name, switch in _SWITCHES.items())
