"""Computes attention of draft trees on NVIDIA GPUs; FlashAttention attends to the context.

Our own kernel (`cuda_kernels.py`) attends to the trees. It merges its result with FlashAttention's,
weighted by the log-sum-exps of both, and writes the output.

Piecewise graphs do not contain attention, so it can be replaced. Full graphs contain it, so engines
with full graphs draft chains.
"""

from typing import Any

import torch
import vllm
from packaging.version import Version
from vllm.utils.torch_utils import canonicalize_singleton_dim_strides
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from sam_rollout.integrations.vllm.trees import cuda_kernels
from sam_rollout.integrations.vllm.trees.split_attention import SplitStep, SplitTreeAttention
from sam_rollout.integrations.vllm.trees.step_trees import StepTrees
from sam_rollout.integrations.vllm.trees.tree_attention import attention_layers

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
        impls = [layer.impl for layer in attention_layers(runner)]
        if len({(impl.num_kv_heads, impl.head_size) for impl in impls}) > 1:
            return "layers with caches of several shapes"
        return super().why_not(runner)

    @classmethod
    def compute(
        cls, impl: Any, step: SplitStep, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, kv_cache: Any, output: torch.Tensor,
    ) -> None:  # fmt: skip
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        keys, values = cls._halves(kv_cache)
        context = flash_attn_varlen_func(
            q=query[step.tokens].flatten(0, 1),
            k=canonicalize_singleton_dim_strides(keys),
            v=canonicalize_singleton_dim_strides(values),
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
        )
        cuda_kernels.add_trees(step, query, key, value, impl.scale, context, output)

    @classmethod
    def move(
        cls, kv_caches: list[Any], slots: torch.Tensor, trees: StepTrees, path: torch.Tensor,
        token_ids: torch.Tensor,
    ) -> None:  # fmt: skip
        first = torch.from_numpy(trees.first).to(path.device, non_blocking=True)
        cuda_kernels.move_accepted(kv_caches, cls.cache_axis, slots, first, path, token_ids)
