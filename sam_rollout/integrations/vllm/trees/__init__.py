"""Draft trees in vLLM's first model runner: positions, attention, verification, compaction.

A draft model continues from the accepted path (`drafter_inputs.py`).
"""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = (
    "v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
    "v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
    "v1.attention.backends.flash_attn:FlashAttentionImpl.forward",
)
