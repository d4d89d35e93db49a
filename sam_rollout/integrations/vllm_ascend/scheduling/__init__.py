"""Scheduling a step ahead in vllm-ascend's engines."""
