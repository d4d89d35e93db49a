"""Triton kernels for draft trees on NVIDIA GPUs: attention inside a tree, and moves in the cache.

The kernels have not run on a GPU yet: tests compile them for a GPU and run them in Triton's
interpreter.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl

from sam_rollout.integrations.vllm.trees.split_attention import Pair, SplitStep


def add_trees(
    step: SplitStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float,
    context: Pair, output: torch.Tensor,
) -> None:  # fmt: skip
    """Compute attention inside the trees, and merge it with the attention to the context.

    Args:
        query, output: [step's tokens, heads, head size]; the result is written to `output`.
        key, value: [step's tokens, heads of the cache, head size].
        context: results for the text before the trees, [R * T, heads, head size], and their
            log-sum-exps, float32 [heads, R * T].
    """
    (rows, nodes), (_, heads, size) = step.tokens.shape, query.shape
    query, key, value = (
        one if one.stride()[1:] == (size, 1) else one.contiguous() for one in (query, key, value)
    )
    found, lse = context
    _add_tree[(rows, heads)](
        query, key, value, step.tokens, step.own, found, lse, output, scale, nodes, size,
        heads // key.shape[1], query.stride(0), key.stride(0), value.stride(0), found.stride(0),
        output.stride(0), lse.stride(0), NODES=block(nodes, 32), SIZE=block(size),
    )  # fmt: skip


def block(width: int, least: int = 16) -> int:
    """Return a power of two that is not below `width`: the length of a block's dimension.

    The length is at least `least`; `tl.dot` needs 16. With a larger `least`, more widths get the
    same length, so fewer kernels have to be compiled.
    """
    return max(least, triton.next_power_of_2(width))


@triton.jit(do_not_specialize=["nodes", "lse_stride"])
def _add_tree(
    query, key, value, tokens, own, found, lse, output, scale, nodes, size, shared, query_stride,
    key_stride, value_stride, found_stride, output_stride, lse_stride,
    NODES: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    node, dim = tl.arange(0, NODES), tl.arange(0, SIZE)
    place = row * nodes + node
    token = tl.load(tokens + place, node < nodes, 0)
    inside = (node < nodes)[:, None] & (dim < size)[None, :]
    at = head * size + dim[None, :]
    at_cache = head // shared * size + dim[None, :]
    q = tl.load(query + token[:, None] * query_stride + at, inside, 0.0).to(tl.float32)
    k = tl.load(key + token[:, None] * key_stride + at_cache, inside, 0.0).to(tl.float32)
    v = tl.load(value + token[:, None] * value_stride + at_cache, inside, 0.0).to(tl.float32)
    seen = (node < nodes)[:, None] & (node < nodes)[None, :]
    seen = tl.load(own + place[:, None] * nodes + node[None, :], seen, 0) != 0
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(seen, scores, float("-inf"))
    before = tl.load(lse + head * lse_stride + place, node < nodes, 0.0)
    before = tl.where(before == float("inf"), float("-inf"), before)  # the context is empty
    most = tl.maximum(tl.max(scores, axis=1), before)
    weights = tl.exp(scores - most[:, None])
    before = tl.exp(before - most)
    total = tl.sum(weights, axis=1) + before
    mixed = tl.dot(weights, v, input_precision="ieee")
    context = tl.load(found + place[:, None] * found_stride + at, inside, 0.0).to(tl.float32)
    mixed = (mixed + before[:, None] * context) / total[:, None]
    # A smaller tree is filled up with copies of its first token, which write no output.
    is_real = (node == 0) | (token != tl.load(tokens + row * nodes))
    here = output + token[:, None] * output_stride + at
    tl.store(here, mixed.to(output.dtype.element_ty), inside & is_real[:, None])


def move_accepted(
    kv_caches: list[torch.Tensor], axis: int, slots: torch.Tensor, first: torch.Tensor,
    path: torch.Tensor, token_ids: torch.Tensor,
) -> None:  # fmt: skip
    """Move accepted tokens' keys and values to the slots of a chain, in all layers at once.

    The host does not wait for the device.

    Args:
        kv_caches: the cache of each layer, [blocks, block size, heads, head size] and one more
            axis, for keys and values. All layers have the same shape and strides.
        axis: the axis for keys and values.
        slots: int [step's tokens], places in the cache.
        first: int [B], index of each request's last known token among the step's tokens.
        path: int64 [B, N + 1], the accepted path's node at each depth.
        token_ids: int32 [B, N + 1], the sampled tokens, then negative numbers.
    """
    kv_cache, (rows, depths) = kv_caches[0], path.shape
    half = kv_cache.select(axis, 0)
    _, in_block, heads, size = half.shape
    addresses = tuple(one.data_ptr() for one in kv_caches)
    _move[(rows, 2 * len(kv_caches))](
        _on_device(addresses, kv_cache.device), slots, first, path, token_ids, depths,
        path.stride(0), token_ids.stride(0), in_block, heads * size, size, kv_cache.stride(axis),
        *half.stride()[:3], WIDTH=block(heads * size),
        TYPE={1: tl.int8, 2: tl.int16, 4: tl.int32}[kv_cache.element_size()],
    )  # fmt: skip


@lru_cache(maxsize=4)  # an engine's caches stay where they are for many steps
def _on_device(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses).to(device)


@triton.jit(do_not_specialize=["depths", "path_stride", "token_stride"])
def _move(
    bases, slots, first, path, token_ids, depths, path_stride, token_stride, in_block, width, size,
    half_stride, block_stride, slot_stride, head_stride, WIDTH: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    row, layer, half = tl.program_id(0), tl.program_id(1) // 2, tl.program_id(1) % 2
    cache = tl.load(bases + layer).to(tl.pointer_type(TYPE)) + half * half_stride
    element = tl.arange(0, WIDTH)
    inside = element < width
    offset = element // size * head_stride + element % size
    root = tl.load(first + row)
    # A node's index is at least its depth, so no move overwrites what a later move reads.
    for depth in range(1, depths):
        node = tl.load(path + row * path_stride + depth)
        if (tl.load(token_ids + row * token_stride + depth) >= 0) & (node != depth):
            source = tl.load(slots + root + node).to(tl.int64)
            target = tl.load(slots + root + depth).to(tl.int64)
            source = source // in_block * block_stride + source % in_block * slot_stride
            target = target // in_block * block_stride + target % in_block * slot_stride
            tl.store(cache + target + offset, tl.load(cache + source + offset, inside), inside)
