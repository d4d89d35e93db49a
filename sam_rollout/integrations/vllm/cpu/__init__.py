"""Works around bugs of vLLM's CPU backend."""
