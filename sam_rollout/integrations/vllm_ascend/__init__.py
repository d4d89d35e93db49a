"""vllm-ascend: its sampler and rejection sampler. Builds on the integration of vLLM."""
