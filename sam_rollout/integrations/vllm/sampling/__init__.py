"""The samplers that replace vLLM's, and a clock for samplers."""

# Names in vLLM that this folder wraps or replaces; tests/contracts/contract.py has a row for each.
WRAPPED = ("v1.sample.rejection_sampler:RejectionSampler.forward",)
