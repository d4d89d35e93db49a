"""The samplers that replace vLLM's, and a clock for samplers."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = ("v1.sample.rejection_sampler:RejectionSampler.forward",)
