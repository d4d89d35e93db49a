"""Handles draft models that vLLM runs: their passes, their weights, and their fit to the policy."""
