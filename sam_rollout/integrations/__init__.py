"""All rollout code that imports vLLM, verl or vllm-ascend, and so depends on their versions."""
