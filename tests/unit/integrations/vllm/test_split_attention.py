"""Compares the two-part attention over draft trees on accelerators with undivided attention.

One part is the context, the other part is the tree. Stand-ins replace vLLM's GPU operators and
follow the operators' documentation.
"""

import math
import os
import subprocess
import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import triton

from sam_rollout.integrations.vllm.trees import cuda_kernels
from sam_rollout.integrations.vllm.trees.cuda_attention import CudaTreeAttention
from sam_rollout.integrations.vllm.trees.split_attention import ROUNDING, SplitStep, attend
from sam_rollout.integrations.vllm.trees.step_trees import trees_of

BRANCHES, CHAIN, BUSH = [-1, 0, 0, 2, 1], [-1, 0, 1, 2, 3], [-1, -1, -1, 0, 1]


def step_of(parents, counts, starts=None, computed=None):
    """Make a step whose requests have these trees, and by default no other tokens."""
    counts = np.array(counts, np.int32)
    if starts is None:
        starts = np.cumsum([0, *(counts + 1)])
    starts = np.array(starts, np.int32)
    computed = np.arange(10, 10 + len(counts)) if computed is None else computed
    kept = np.arange(len(counts), dtype=np.int32)
    device = torch.device("cpu")
    trees, _ = trees_of(counts, kept, starts[1:], np.array(parents, np.int32), device)
    table = 100 + torch.arange(len(counts)).view(-1, 1)
    return trees, SplitStep.of(trees, starts, np.array(computed, np.int32), table)


def test_rows_with_trees_are_read_and_others_left_alone():
    _, step = step_of([BRANCHES, CHAIN, BUSH], [5, 5, 2])
    assert step.table.tolist() == [[100], [102]] and not step.is_whole
    assert step.tokens[1].tolist() == [12, 13, 14, 12, 12, 12]
    assert step.starts.tolist() == [0, 6, 12]
    assert step.lengths == step.context.tolist() == [10, 12]
    assert step.own[0, 4].int().tolist() == [1, 1, 0, 1, 1, 0], "the path to node 4 is 1, 3, 4"
    assert step.own[1, 2].tolist() == [True, False, True, False, False, False]


def test_known_tokens_of_the_step_before_the_last_are_context():
    """The request computes three known tokens and a tree of two tokens."""
    _, step = step_of([[-1, -1]], [2], starts=[0, 5], computed=[7])
    assert step.tokens.tolist() == [[2, 3, 4]] and step.lengths == [9] and not step.is_whole
    assert step_of([[-1, -1]], [2])[1].is_whole


def flash_attention(
    *, q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, softmax_scale, causal,
    block_table, return_softmax_lse, fa_version, num_splits,
):  # fmt: skip
    """Return results [tokens, heads, size], and the log-sum-exp, float32 [heads, tokens]."""
    assert return_softmax_lse and not causal and fa_version == 3 and num_splits == 0
    assert max_seqlen_k == max(seqused_k) and cu_seqlens_q.diff().eq(max_seqlen_q).all()
    assert all(t.dtype == torch.int32 for t in (cu_seqlens_q, seqused_k, block_table))
    found, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    shared = q.shape[1] // k.shape[2]
    for row, (begin, end) in enumerate(pairwise(cu_seqlens_q)):
        pages, length = block_table[row].long(), int(seqused_k[row])
        keys, values = (
            cache[pages].flatten(0, 1)[:length].float().repeat_interleave(shared, 1)
            for cache in (k, v)
        )
        scores = torch.einsum("thd,shd->hts", q[begin:end].float(), keys) * softmax_scale
        lse[:, begin:end] = scores.logsumexp(2)
        found[begin:end] = torch.einsum("hts,shd->thd", scores.softmax(2), values).to(q.dtype)
    return found, lse


def add_plainly(step, query, key, value, scale, context, output):
    """Add each tree's attention to the context's attention, as the GPU kernel does."""
    own, lse = attend(query[step.tokens], key[step.tokens], value[step.tokens], step.own, scale)
    found, context_lse = context[0].view_as(own), context[1].T.view_as(lse)
    weights = torch.stack([context_lse, lse]).softmax(0).unsqueeze(4)
    merged = (weights * torch.stack([found, own])).sum(0)
    for row, tokens in enumerate(step.tokens):
        for node, token in enumerate(tokens):
            if node == 0 or token != tokens[0]:
                output[token] = merged[row, node]


def move_plainly(kv_caches, axis, slots, first, path, token_ids, rows=None):
    """Move accepted tokens, as the GPU kernel does; `rows` limits the number of requests."""
    for row, tokens in enumerate(token_ids[:rows]):
        for depth in range(1, int((tokens >= 0).sum())):
            source, target = slots[first[row] + path[row, depth]], slots[first[row] + depth]
            for half in (half for cache in kv_caches for half in cache.unbind(axis)):
                size = half.shape[1]
                half[target // size, target % size] = half[source // size, source % size]


FAULTS = {
    "no": (flash_attention, add_plainly),
    "a tree's attention alone": (
        lambda **others: (lambda found, lse: (found, lse - 100))(*flash_attention(**others)),
        add_plainly),
    "a short context": (
        lambda seqused_k, max_seqlen_k, **others: flash_attention(
            seqused_k=seqused_k.clamp(max=512), max_seqlen_k=512, **others), add_plainly),
    "nothing that is a number": (
        flash_attention, lambda *_: _[-1].fill_(float("nan"))),
    "an error": (None, add_plainly),
    "moves in one request alone": (flash_attention, add_plainly, partial(move_plainly, rows=1)),
}  # fmt: skip


def runner_of(dtype, k, heads, kv_heads, size, graphs=False, **impl):
    impl = SimpleNamespace(
        num_heads=heads, num_kv_heads=kv_heads, head_size=size, scale=size**-0.5,
        vllm_flash_attn_version=3, batch_invariant_enabled=False, **impl,
    )  # fmt: skip
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: graphs),
            static_forward_context={"0": SimpleNamespace(impl=impl), "experts": object()},
        ),
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(block_size=16),
        num_spec_tokens=k,
        device=torch.device("cpu"),
    )


@pytest.fixture
def with_fault(monkeypatch):
    def set_up(name):
        attention, adding, moving, *_ = *FAULTS[name], move_plainly
        stand_in = SimpleNamespace(flash_attn_varlen_func=attention)
        monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn", stand_in)
        monkeypatch.setattr(cuda_kernels, "add_trees", adding)
        monkeypatch.setattr(cuda_kernels, "move_accepted", moving)
        monkeypatch.setattr("vllm.__version__", "0.24.1")

    return set_up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(4, 4, 16), (8, 2, 16), (6, 1, 24)])
@pytest.mark.parametrize("k", [2, 8, 20])
def test_both_parts_give_what_one_part_gives(k, shape, dtype, with_fault):
    with_fault("no")
    runner = runner_of(dtype, k, *shape)
    impl = runner.compilation_config.static_forward_context["0"].impl
    assert 0 < CudaTreeAttention.deviation(impl, runner) < ROUNDING[dtype]
    assert not CudaTreeAttention.why_not(runner)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trial_at_the_start_finds_operators_that_are_wrong(fault, with_fault):
    with_fault(fault)
    reason = CudaTreeAttention.why_not(runner_of(torch.bfloat16, 8, 8, 2, 16))
    assert bool(reason) == (fault != "no"), reason


def test_what_the_operators_cannot_do_is_refused(with_fault, monkeypatch):
    with_fault("no")
    why_not, shape = CudaTreeAttention.why_not, (torch.bfloat16, 8, 4, 2, 16)
    assert why_not(runner_of(*shape, sinks=torch.zeros(4))) == "attention with sinks"
    assert "full graphs" in why_not(runner_of(*shape, graphs=True))
    several = runner_of(*shape)
    other = runner_of(torch.bfloat16, 8, 4, 1, 16).compilation_config.static_forward_context
    several.compilation_config.static_forward_context["1"] = other["0"]
    assert why_not(several) == "layers with caches of several shapes"
    monkeypatch.setattr("vllm.__version__", "0.31.0")
    assert "not 0.31.0" in why_not(runner_of(*shape))


class Layer(torch.nn.Module):
    """An attention layer whose own attention fills its output with zeros."""

    def __init__(self, impl):
        super().__init__()
        impl.forward = lambda *arguments: arguments[-1].zero_()
        self.impl = impl


def test_layers_compute_trees_in_two_parts_and_other_rows_as_before(with_fault):
    with_fault("no")
    trees, _ = step_of([BRANCHES, CHAIN], [5, 2])
    context = runner_of(torch.float32, 5, 4, 2, 8).compilation_config.static_forward_context
    layer = Layer(context["0"].impl)
    runner = SimpleNamespace(
        get_model=lambda: layer,
        query_start_loc=SimpleNamespace(np=np.array([0, 6, 9], np.int32)),
        input_batch=SimpleNamespace(num_computed_tokens_cpu=np.array([10, 11])),
    )
    slots = SimpleNamespace(gpu=torch.arange(9) + 10)
    runner.input_batch.block_table = [SimpleNamespace(slot_mapping=slots)]
    keeper = SimpleNamespace(step=None)
    with mock.patch.object(CudaTreeAttention, "implementation", SimpleNamespace):
        attention = CudaTreeAttention(runner, keeper)
    query, key, cache = torch.randn(9, 4, 8), torch.randn(9, 2, 8), torch.randn(2, 2, 16, 2, 8)
    metadata = SimpleNamespace(block_table=torch.tensor([[1], [0]], dtype=torch.int32))

    def output():
        given = torch.ones(9, 32)
        return layer.impl.forward(layer, query, key, key, cache, metadata, given)

    assert not output().any()
    keeper.step = trees
    shown = output()
    assert shown[:6].any(dim=1).all() and not shown[6:].any(), "the second request has a chain"
    # The first and third draft tokens are accepted, so keys and values of the third token move to
    # the position after the first token.
    expected, path = cache.clone(), torch.tensor([[0, 1, 3, 0, 0, 0], [0] * 6])
    attention.accept(trees, path, torch.tensor([[7, 8, 9, -1, -1, -1], [7, *[-1] * 5]]))
    expected[0, :, 12] = expected[0, :, 13]
    assert torch.equal(cache, expected)
    attention.detach()
    assert not output().any()


def test_the_kernels_compute_the_same_in_tritons_interpreter():
    subprocess.run(
        [sys.executable, "-c", f"import {__name__} as test; test.try_the_kernels()"],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        check=True,
    )


def try_the_kernels():
    stand_in = SimpleNamespace(flash_attn_varlen_func=flash_attention)
    with mock.patch.dict(sys.modules, {"vllm.vllm_flash_attn": stand_in}):
        shapes = [(4, 4, 16), (8, 2, 16), (6, 1, 24)]
        for shape, dtype in zip(shapes, ROUNDING, strict=True):  # the interpreter is slow
            runner = runner_of(dtype, 5, *shape)
            impl = runner.compilation_config.static_forward_context["0"].impl
            assert 0 < CudaTreeAttention.deviation(impl, runner) < ROUNDING[dtype]
            assert_adds_trees(dtype, *shape)
    for dtype in (torch.float32, torch.bfloat16):
        for cache in (torch.randn(7, 2, 4, 3, 8), torch.randn(7, 2, 3, 4, 8).transpose(2, 3)):
            assert_moves_accepted([cache.to(dtype), cache.to(dtype) + 1])


def assert_adds_trees(dtype, heads, kv_heads, size):
    """Compare the kernel with plain operations.

    The first tree has no context. The second request has a chain, which the kernel leaves alone.
    The third tree is filled up.
    """
    _, step = step_of([BRANCHES, CHAIN, BUSH], [5, 5, 2])
    together = torch.randn(15, heads + 2 * kv_heads, size).to(dtype)
    query, key, value = together.split([heads, kv_heads, kv_heads], dim=1)
    found, lse = torch.randn(12, heads, size).to(dtype), torch.randn(heads, 12)
    found[:6], lse[:, :6] = 0, -math.inf
    lse[:, 6:9] += 200  # float32 overflows unless a maximum is subtracted before exp()
    expected = torch.full_like(query, 7)
    add_plainly(step, query, key, value, 0.3, (found, lse), expected)
    assert expected[6:12].eq(7).all() and not expected[:6].eq(7).any()
    for empty in (-math.inf, math.inf):
        output = torch.full_like(query, 7)
        lse[:, :6] = empty
        cuda_kernels.add_trees(step, query, key, value, 0.3, (found, lse), output)
        torch.testing.assert_close(output, expected, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


def assert_moves_accepted(caches):
    """Compare the kernel's moves, in all layers, with plain moves.

    One request has no moves. Some moves write a slot that another move reads.
    """
    expected = [cache.clone() for cache in caches]
    path = torch.zeros(3, 5, dtype=torch.int64)[:, :4]
    path[:] = torch.tensor([[0, 2, 4, 5], [0, 1, 2, 0], [0, 2, 3, 0]])
    token_ids = torch.tensor([[5, 6, 7, -1], [1, 2, 3, -1], [1, 2, 3, -1]], dtype=torch.int32)
    slots = torch.tensor([3, 4, 5, 6, 7, 8, 17, 18, 19, 22, 23, 20, 9])
    first = torch.tensor([0, 6, 9], dtype=torch.int32)
    cuda_kernels.move_accepted(caches, 1, slots, first, path, token_ids)
    move_plainly(expected, 1, slots, first, path, token_ids)
    assert all(map(torch.equal, caches, expected))


def test_the_kernels_for_gpus_compile_without_one():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    pointers = dict.fromkeys(("query", "key", "value", "found", "output"), "*bf16")
    pointers |= {"tokens": "*i64", "own": "*i1", "lse": "*fp32", "scale": "fp32"}
    blocks = {"NODES": 16, "SIZE": 128}
    moving = dict.fromkeys(("bases", "slots", "path"), "*i64") | {"half_stride": "i64"}
    moving |= {"first": "*i32", "token_ids": "*i32"}
    for kernel, types, constants in [
        (cuda_kernels._add_tree, pointers, blocks),
        (cuda_kernels._move, moving, {"WIDTH": 1024, "TYPE": triton.language.int16}),
    ]:
        types = {name: types.get(name, "i32") for name in kernel.arg_names}
        source = ASTSource(kernel, types | dict.fromkeys(constants, "constexpr"), constants)
        assert "cubin" in compile(source, target=GPUTarget("cuda", 90, 32)).asm
