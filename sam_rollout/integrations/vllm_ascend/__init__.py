"""The integration of vllm-ascend, which builds on the integration of vLLM."""
