"""Computes attention of draft trees on NVIDIA GPUs; FlashAttention attends to the context.

Between piecewise graphs, attention can be replaced. In full graphs it cannot, so engines with full
graphs draft chains.
"""

from typing import Any

import torch
import vllm
from packaging.version import Version
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from sam_rollout.integrations.vllm.trees.split_attention import Pair, SplitStep, SplitTreeAttention

RELEASE = "0.24"  # the layout of caches differs in other releases


class CudaTreeAttention(SplitTreeAttention):
    """Replaces FlashAttention in vLLM's attention layers."""

    implementation = FlashAttentionImpl
    table_name = "block_table"
    writes_cache = False
    cache_axis = 1
    goes_with_model = True

    @classmethod
    def why_not(cls, runner: Any) -> str:
        if Version(vllm.__version__).release[:2] != Version(RELEASE).release:
            return f"trees on GPUs are written for vLLM {RELEASE}, not {vllm.__version__}"
        return super().why_not(runner)

    @classmethod
    def add_context(
        cls, impl: Any, step: SplitStep, query: torch.Tensor, cache: Pair, own: Pair
    ) -> torch.Tensor:
        from vllm.v1.attention.ops.merge_attn_states import merge_attn_states
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        query = query.flatten(0, 1)
        found, lse = flash_attn_varlen_func(
            q=query,
            k=canonicalize_singleton_dim_strides(cache[0]),
            v=canonicalize_singleton_dim_strides(cache[1]),
            max_seqlen_q=step.tokens.shape[1],
            cu_seqlens_q=step.starts,
            max_seqlen_k=max(step.lengths),
            seqused_k=step.context,
            softmax_scale=impl.scale,
            causal=False,
            block_table=step.table,
            return_softmax_lse=True,
            fa_version=impl.vllm_flash_attn_version,
            num_splits=1 if impl.batch_invariant_enabled else 0,
        )  # found [R * T, heads, head size], lse [heads, R * T]
        merged, own_found = torch.empty_like(query), own[0].flatten(0, 1).to(query.dtype)
        own_lse = own[1].flatten(0, 1).T.contiguous()
        merge_attn_states(merged, found, lse, own_found.contiguous(), own_lse)
        return merged
