"""Draft models that vLLM runs: their passes, their weights, and checks that they fit the policy."""
