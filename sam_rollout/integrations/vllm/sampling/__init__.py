"""The samplers that replace vLLM's, and a clock for samplers."""
