"""Runs draft trees in vLLM's first model runner: positions, attention, verification, cache.

A draft model continues from the accepted path (`drafter_inputs.py`).
"""
