"""A trial: drafter and sampler inside vLLM's second model runner."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = (
    "config.vllm:VllmConfig._get_v2_model_runner_unsupported_features",
    "v1.worker.gpu.spec_decode:init_speculator",
    "v1.worker.gpu.model_runner:GPUModelRunner.take_draft_token_ids",
    "v1.worker.gpu.model_runner:GPUModelRunner.finish_requests",
    "v1.worker.gpu.model_runner:GPUModelRunner.add_requests",
    "v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
)
