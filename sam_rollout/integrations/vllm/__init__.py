"""Lets vLLM draft with our code: proposer, worker extension, recorder, plugin, workarounds."""
