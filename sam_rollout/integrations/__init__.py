"""The only place that names vLLM, verl or vllm-ascend: an upstream change touches one folder."""
