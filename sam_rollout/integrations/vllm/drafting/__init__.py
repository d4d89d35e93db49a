"""Turns the rows of vLLM's batch into steps of a `DraftSession`, inside vLLM's model runner."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = ("v1.worker.gpu_model_runner:GPUModelRunner._sample",)
