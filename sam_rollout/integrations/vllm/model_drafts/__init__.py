"""Draft models that vLLM runs: their passes, their weights, and checks that they fit the policy."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = (
    "v1.worker.gpu_model_runner:GPUModelRunner.propose_draft_token_ids",
    "v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._greedy_sample",
    "v1.spec_decode.llm_base_proposer:SpecDecodeBaseProposer._maybe_share_embeddings",
)
