"""The drafter inside vLLM's model runner: it makes rows of the batch into a step of a session."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = ("v1.worker.gpu_model_runner:GPUModelRunner._sample",)
