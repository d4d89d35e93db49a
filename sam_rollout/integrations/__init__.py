"""All rollout code that imports vLLM, verl or vllm-ascend: upstream changes affect this folder."""
