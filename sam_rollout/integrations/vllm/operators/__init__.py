"""The check that verifying several tokens at a time gives the logits of decoding them singly."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = ("v1.worker.gpu_model_runner:GPUModelRunner._sample",)
