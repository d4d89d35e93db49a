"""Draft models that vLLM runs: their passes, their weights, and checks that they fit the policy."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = (
    "v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    "v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._greedy_sample",
    "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._maybe_share_embeddings",
)
