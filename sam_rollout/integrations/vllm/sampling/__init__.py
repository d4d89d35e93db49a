"""Contains samplers that replace vLLM's samplers."""
