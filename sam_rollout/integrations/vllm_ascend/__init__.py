"""Integrates vllm-ascend, and builds on the integration of vLLM."""
