"""Drafting inside vLLM: proposer, worker extension, step recorder, plugin, workarounds."""
