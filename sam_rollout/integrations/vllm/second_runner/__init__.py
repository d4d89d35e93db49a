"""A trial: drafter and sampler inside vLLM's second model runner."""
