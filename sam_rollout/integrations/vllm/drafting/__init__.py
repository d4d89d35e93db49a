"""Turns the rows of vLLM's batch into steps of a `DraftSession`, inside vLLM's model runner."""
