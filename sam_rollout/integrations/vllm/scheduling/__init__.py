"""The scheduling of drafts: schedulers, late binding, engines in lockstep, rules for requests."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = (
    "config.vllm:VllmConfig.__post_init__",
    "v1.engine.core:EngineCore.post_step",
    "v1.engine.detokenizer:BaseIncrementalDetokenizer.update",
    "v1.engine.logprobs:LogprobsProcessor.update_from_output",
    "sampling_params:SamplingParams._validate_spec_decode",
    "v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
    "v1.worker.gpu_model_runner:GPUModelRunner.sample_tokens",
    "v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
    "v1.worker.gpu_model_runner:GPUModelRunner._model_forward",
    "v1.worker.gpu_model_runner:GPUModelRunner._calc_spec_decode_metadata",
    "v1.worker.dp_utils:dist",
)
