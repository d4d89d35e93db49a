"""Checks that verifying several tokens at a time gives the same logits as decoding them singly."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = ("v1.worker.gpu_model_runner:GPUModelRunner._sample",)
