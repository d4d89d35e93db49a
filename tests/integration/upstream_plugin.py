"""pytest plugin for vLLM's own tests of its rejection sampler on a CPU."""

from itertools import chain

import torch
from cpu_kernels import use_cpu_kernels


def pytest_sessionstart():
    import vllm.v1.spec_decode.metadata as metadata

    use_cpu_kernels()
    # Their dummy metadata joins lists by sum(lists, []): ten seconds a test for 100 000 requests.
    metadata.sum = lambda lists, _: list(chain.from_iterable(lists))


def pytest_runtest_setup():
    """Draw the same in every run: one of their tests is about distributions."""
    torch.manual_seed(0)
