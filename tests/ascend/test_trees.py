"""Tests attention over draft trees on NPUs; stand-ins in torch replace the NPU's operators."""

from types import SimpleNamespace

import pytest
import torch
import torch_npu
import vllm_ascend.sample.rejection_sampler  # noqa: F401  # first: other modules import in a circle
from npu_stand_in.operators import npu_attention_update, npu_fused_infer_attention_score

from sam_rollout.integrations.vllm.trees.split_attention import ROUNDING
from sam_rollout.integrations.vllm_ascend.trees import AscendTreeAttention

OPERATOR = npu_fused_infer_attention_score


@pytest.fixture(params=[OPERATOR])
def operator(request, monkeypatch):
    """Install the operator for attention to the context; a test may install a wrong one instead."""
    monkeypatch.setattr(torch_npu, "npu_fused_infer_attention_score", request.param)
    monkeypatch.setattr(torch_npu, "npu_attention_update", npu_attention_update)
    return request.param


def runner_of(dtype, k, heads, kv_heads, size):
    impl = SimpleNamespace(num_heads=heads, num_kv_heads=kv_heads, head_size=size, scale=size**-0.5)
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=None, static_forward_context={"0": SimpleNamespace(impl=impl)}
        ),
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(block_size=128),
        num_spec_tokens=k,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4, 16), (8, 2, 16), (6, 1, 24)])
@pytest.mark.parametrize("k", [2, 15])
def test_both_parts_give_what_one_part_gives(k, shape, dtype, operator):
    runner = runner_of(dtype, k, *shape)
    impl = runner.compilation_config.static_forward_context["0"].impl
    assert 0 < AscendTreeAttention.deviation(impl, runner) < ROUNDING[dtype]


def all_alike(query, *others, **options):
    """Give every token of the context the same weight, which is wrong."""
    return OPERATOR(0 * query, *others, **options)


def short(*others, actual_seq_lengths_kv, **options):
    """Leave out all tokens of the context beyond 512, which is wrong."""
    lengths = [min(length, 512) for length in actual_seq_lengths_kv]
    return OPERATOR(*others, actual_seq_lengths_kv=lengths, **options)


def missing(*_others, **_options):
    raise RuntimeError("aclnnFusedInferAttentionScoreV3 failed")


@pytest.mark.parametrize("operator", [OPERATOR, all_alike, short, missing], indirect=True)
def test_operators_that_are_wrong_are_found_at_the_start(operator):
    reason = AscendTreeAttention.why_not(runner_of(torch.bfloat16, 15, 8, 2, 16))
    assert bool(reason) == (operator is not OPERATOR), reason
    assert "15" in AscendTreeAttention.why_not(runner_of(torch.bfloat16, 16, 8, 2, 16))
