"""Holds all rollout code that imports vLLM, verl or vllm-ascend and depends on their versions."""
