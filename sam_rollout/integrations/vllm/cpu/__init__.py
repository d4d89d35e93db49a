"""Workarounds for bugs of vLLM's CPU backend."""
