"""Drafts of a model that vllm-ascend runs."""
