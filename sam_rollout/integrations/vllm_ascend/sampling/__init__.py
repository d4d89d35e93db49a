"""Samplers that follow vllm-ascend's rules on logits."""
