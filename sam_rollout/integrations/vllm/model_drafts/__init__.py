"""Handles draft models that vLLM runs: passes, weights, and checks that they fit the policy."""
