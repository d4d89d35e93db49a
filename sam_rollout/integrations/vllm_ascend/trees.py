"""Computes attention over draft trees on NPUs.

The vendor's operator `npu_fused_infer_attention_score` computes attention to the text before the
tree. Two faults of the operator were reported: it ignores masks beyond 512 tokens (vllm-ascend
issue 15503), and if it gets neither mask nor pages, all tokens get the same weight (issue 13699).
Here the operator gets pages and no mask, a case that neither report names. The engine's trial of
operators, before the first step, would notice both faults.
"""

from typing import Any

import torch
from vllm_ascend.attention.attention_v1 import AscendAttentionBackendImpl

from sam_rollout.integrations.vllm.trees.split_attention import (
    SplitStep,
    SplitTreeAttention,
    attend,
)
from sam_rollout.integrations.vllm.trees.step_trees import StepTrees, moves

MOST_NODES = 15  # the operator takes at most 16 tokens of a request


class AscendTreeAttention(SplitTreeAttention):
    """Replaces the attention of vllm-ascend's layers."""

    implementation = AscendAttentionBackendImpl
    table_name = "block_tables"
    writes_cache = True
    cache_axis = 0
    goes_with_model = False  # `drafter_inputs.py` fits only vLLM's runner

    @classmethod
    def why_not(cls, runner: Any) -> str:
        if runner.num_spec_tokens > MOST_NODES:
            return f"NPUs verify trees of up to {MOST_NODES} tokens (sam.max_draft_tokens)"
        return super().why_not(runner)

    @classmethod
    def compute(
        cls, impl: Any, step: SplitStep, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kv_cache: Any, output: torch.Tensor,
    ) -> None:  # fmt: skip
        import torch_npu

        query, cache = query[step.tokens], cls._halves(kv_cache)
        rows, nodes, heads, size = query.shape
        own, own_lse = attend(query, key[step.tokens], value[step.tokens], step.own, impl.scale)
        found, lse = torch_npu.npu_fused_infer_attention_score(
            query,
            *(half.view(*half.shape[:2], -1) for half in cache),
            num_heads=heads,
            num_key_value_heads=impl.num_kv_heads,
            input_layout="BSND",
            atten_mask=None,
            scale=impl.scale,
            antiquant_mode=0,
            antiquant_scale=None,
            softmax_lse_flag=True,
            block_table=step.table,
            block_size=cache[0].shape[1],
            actual_seq_lengths_kv=step.lengths,
            actual_seq_lengths=[nodes] * rows,
        )  # found [R, T, heads, head size], lse [R, heads, T, 1]
        merged, _ = torch_npu.npu_attention_update(
            (lse.transpose(1, 2).float().reshape(-1), own_lse.reshape(-1)),
            (found.float().reshape(-1, size), own.reshape(-1, size)),
            0,
        )
        # A filled-up tree writes its first token's result several times: the same result each time.
        output[step.tokens] = merged.view(rows, nodes, heads, size).to(output.dtype)

    @classmethod
    def move(
        cls, kv_caches: list[Any], slots: torch.Tensor, trees: StepTrees, path: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:  # fmt: skip
        source, target = moves(trees, path, token_ids)
        if not len(source):
            return
        source, target = slots[source].long(), slots[target].long()
        for kv_cache in kv_caches:
            for cache in cls._halves(kv_cache):
                size = cache.shape[1]
                cache[target // size, target % size] = cache[source // size, source % size]
