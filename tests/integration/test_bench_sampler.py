import pytest

from sam_rollout.bench import stock_samplers
from tests.rejection import check_rejection_sampling


def test_vllm_kernels_sample_from_the_target():
    by_name = {sampler.name: sampler for sampler in stock_samplers.available("cpu")}
    if "vllm_cpu" not in by_name:
        pytest.skip("no CPU kernels in this vLLM")
    check_rejection_sampling(by_name["vllm_cpu"].sample)
