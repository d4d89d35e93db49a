"""Tries out our drafter and sampler inside vLLM's second model runner."""
