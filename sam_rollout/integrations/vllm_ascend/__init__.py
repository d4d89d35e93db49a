"""The integration of vllm-ascend, which builds on the integration of vLLM."""

# Wrapped names of vllm-ascend; tests/contracts/contract.py has a row for each.
WRAPPED = (
    "worker.model_runner_v1:NPUModelRunner.__init__",
    "worker.model_runner_v1:NPUModelRunner._get_drafter",
    "worker.model_runner_v1:NPUModelRunner.propose_draft_token_ids",
    "worker.model_runner_v1:NPUModelRunner._prepare_inputs",
    "attention.attention_v1:AscendAttentionBackendImpl.forward",
    "spec_decode.llm_base_proposer:AscendSpecDecodeBaseProposer._maybe_share_embeddings",
    "spec_decode.llm_base_proposer:AscendSpecDecodeBaseProposer._maybe_share_lm_head",
)
