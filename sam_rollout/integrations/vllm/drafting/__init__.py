"""The drafter inside vLLM's model runner, which turns the batch's rows into a session's steps."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = ("v1.worker.gpu_model_runner:GPUModelRunner._sample",)
