"""Our samplers with vllm-ascend's processing of logits."""
