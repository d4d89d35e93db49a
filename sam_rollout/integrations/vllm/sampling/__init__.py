"""Contains samplers that replace vLLM's samplers, and a clock for samplers."""
