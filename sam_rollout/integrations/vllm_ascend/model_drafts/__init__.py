"""Draft models that vllm-ascend runs."""
