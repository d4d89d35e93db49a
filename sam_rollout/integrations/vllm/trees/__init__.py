"""Draft trees in vLLM's first model runner: positions, attention, verification, compaction.

A draft model continues from the accepted path (`drafter_inputs.py`).
"""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = (
    "v1.worker.gpu_model_runner:GPUModelRunner._prepare_inputs",
    "v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    "v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward",
)
