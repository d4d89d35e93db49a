"""The samplers that take the place of vLLM's, and how long samplers take."""

# The names of vLLM that modules here wrap or replace, each a row of tests/contracts/contract.py.
WRAPPED = ("v1.sample.rejection_sampler:RejectionSampler.forward",)
